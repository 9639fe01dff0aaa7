"""Writer of a run, and the takeover of the run from it: `/ui/{root}/{run}/take-over`."""

from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Administrator, Reader
from cairn.service.actions import writers
from cairn.service.dashboard.form_fields import FormDependency, body_of, invalid
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.schemas import TakeOverRequest

router: Final = page_router(StorePage)


@router.get("/ui/{root}/{run}/writer")
def writer_part(caller: Reader, request: RunRequestDependency) -> HTMLResponse:
    """Show the current writer of the run, read from the store."""
    writer = writers.get_writer(request.plane, *request.names)
    return request.render("run/writer.html", root=request.root, name=request.run, writer=writer)


@router.get("/ui/{root}/{run}/take-over")
def take_over_page(caller: Reader, request: RunRequestDependency) -> HTMLResponse:
    """Explain a takeover of the run from its writer, and show the form for it."""
    writer = writers.get_writer(request.plane, *request.names)
    return request.render("run/take_over.html", root=request.root, name=request.run, writer=writer)


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
