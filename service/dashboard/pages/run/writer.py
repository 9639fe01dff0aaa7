"""Writer of a run, and the takeover of the run from it: `/ui/{root}/{run}/take-over`."""

from typing import Final

from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import writers
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import RunRequestDependency

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
