"""Form route that takes a run over from its writer."""

from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Administrator
from cairn.service.actions import writers
from cairn.service.dashboard.forms.fields import FormDependency, body_of, invalid
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.schemas import (
    TakeOverRequest,
)

router: Final = page_router()


@router.post("/ui/{root}/{run}/take-over")
def take_over_form(
    caller: Administrator, request: RunRequestDependency, form: FormDependency
) -> HTMLResponse:
    """Take the run over from the writer that the page showed, if the box is ticked."""
    if not form.checked("sure"):
        raise invalid("sure", "tick the box first")
    body = body_of(TakeOverRequest, attempt=form.number("attempt"), reason=form.text("reason"))
    taken = writers.take_over_run(request.plane, caller, *request.names, body)
    return request.render("run/taken_over.html", root=request.root, name=request.run, taken=taken)
