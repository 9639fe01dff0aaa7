"""Form route that exports a step."""

from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import convert
from cairn.service.dashboard.forms.fields import FormDependency, body_of
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import StepRequestDependency
from cairn.service.schemas import (
    ConvertRequest,
)

router: Final = page_router()


@router.post("/ui/{root}/{run}/steps/{step}/convert")
def convert_form(
    caller: Operator, request: StepRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Start an export of the step."""
    request.require_shown(form.number("attempt"))
    body = body_of(
        ConvertRequest,
        format=form.text("format") or "huggingface",
        dtype=form.text("dtype") or None,
        max_shard_size=form.text("max_shard_size") or "5GB",
        lora=form.text("lora") or "merge",
        allow_nonfinite=form.checked("allow_nonfinite"),
        check_logits=form.checked("check_logits"),
        despite_damage=form.text("despite_damage") or None,
    )
    started = convert.convert_checkpoint(
        request.plane, caller, *request.names, body, idempotency_key=None
    )
    return request.render("operations/card.html", operation=started)
