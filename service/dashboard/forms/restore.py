"""Form routes that go back to a step: fork, roll back."""

from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import restore, runs
from cairn.service.dashboard.forms.fields import FormDependency, body_of
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.service.errors import InvalidRequestError
from cairn.service.http.entity_tags import body_etag
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import (
    RestoreMode,
    RestoreRequest,
)

router: Final = page_router()


@router.post("/ui/{root}/{run}/steps/{step}/fork")
def fork_form(
    caller: Operator, request: StepRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start a new run from the step."""
    request.require_shown(form.number("attempt"))
    body = body_of(
        RestoreRequest,
        mode=RestoreMode.FORK,
        run=form.text("run"),
        despite_damage=form.text("despite_damage") or None,
    )
    started = restore.restore_checkpoint(
        request.plane, caller, *request.names, body, seen=None, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)


@router.post("/ui/{root}/{run}/steps/{step}/rollback")
def rollback_form(
    caller: Operator, request: StepRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Supersede later steps of the run, unless a step was saved since the page showed the run."""
    request.require_shown(form.number("attempt"))
    body = body_of(
        RestoreRequest,
        mode=RestoreMode.ROLLBACK,
        strand=form.texts("strand"),
        despite_damage=form.text("despite_damage") or None,
    )
    current = runs.get_run(request.plane, request.root, request.run, refresh=True)
    if current.latest_step != form.number("latest"):
        raise InvalidRequestError(
            f"The latest step is {current.latest_step} now, no longer {form.text('latest')}. "
            "Reload the page to see what would be superseded."
        )
    seen = Seen(frozenset({body_etag(current)}))
    started = restore.restore_checkpoint(
        request.plane, caller, *request.names, body, seen=seen, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)
