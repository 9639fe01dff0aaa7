"""Form routes that verify a run or a step."""

from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import (
    verify,
)
from cairn.service.dashboard.forms.fields import FormDependency, body_of
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import RunRequestDependency, StepRequestDependency
from cairn.service.schemas import (
    VerifyRunRequest,
)

router: Final = page_router()


@router.post("/ui/{root}/{run}/verify")
def verify_run_form(
    caller: Operator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start to verify the run's records, and those listed steps that the form's `steps` names."""
    body = body_of(VerifyRunRequest, steps=form.text("steps") or "all")
    started = verify.verify_run(
        request.plane, caller, *request.names, steps=body.steps, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/ui/{root}/{run}/steps/{step}/verify")
def verify_step_form(caller: Operator, request: StepRequestDependency) -> HTMLResponse:
    """Start to verify the step."""
    started = verify.verify_checkpoint(request.plane, caller, *request.names, idempotency_key=None)
    return request.render("operations/card.html", operation=started)
