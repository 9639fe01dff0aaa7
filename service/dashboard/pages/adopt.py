"""Import of checkpoints that plain Orbax saved: `/adopt`."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=CatalogPage
)


@router.get("/adopt")
def adopt_page(request: Request, caller: Reader, plane: PlaneDependency) -> HTMLResponse:
    """Show the form that asks for a folder and for the run to import it as."""
    return page(request, "runs/adopt.html", roots=caller.visible(plane.roots))
