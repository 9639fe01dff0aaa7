"""Who writes a run, and taking it from them: `/ui/{root}/{run}/take-over`."""

from typing import Final

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dashboard.asked import OfRun
from cairn.service.dashboard.page_routes import StorePage

router: Final = APIRouter(
    prefix="/ui/{root}/{run}",
    include_in_schema=False,
    default_response_class=HTMLResponse,
    route_class=StorePage,
)


@router.get("/writer")
def writer_part(caller: Reader, asked: OfRun) -> HTMLResponse:
    """Who writes the run now, as the store says."""
    writer = actions.get_writer(asked.plane, *asked.names)
    return asked.page("run/writer.html", root=asked.root, name=asked.run, writer=writer)


@router.get("/take-over")
def take_over_page(caller: Reader, asked: OfRun) -> HTMLResponse:
    """What it means to take the run from who holds it, and the form that does."""
    writer = actions.get_writer(asked.plane, *asked.names)
    return asked.page("run/take_over.html", root=asked.root, name=asked.run, writer=writer)
