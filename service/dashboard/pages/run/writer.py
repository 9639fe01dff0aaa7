"""Who writes a run, and taking it from them: `/ui/{root}/{run}/take-over`."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dashboard.page_routes import StorePage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName

router: Final = APIRouter(
    prefix="/ui/{root}/{run}",
    include_in_schema=False,
    default_response_class=HTMLResponse,
    route_class=StorePage,
)


@router.get("/writer")
def writer_part(
    request: Request, caller: Reader, root: RootName, run: RunName, plane: PlaneDependency
) -> HTMLResponse:
    """Who writes the run now, as the store says."""
    writer = actions.get_writer(plane, root, run)
    return page(request, "run/writer.html", root=root, name=run, writer=writer)


@router.get("/take-over")
def take_over_page(
    request: Request, caller: Reader, root: RootName, run: RunName, plane: PlaneDependency
) -> HTMLResponse:
    """What it means to take the run from who holds it, and the form that does."""
    writer = actions.get_writer(plane, root, run)
    return page(request, "run/take_over.html", root=root, name=run, writer=writer)
