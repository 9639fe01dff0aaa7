"""Import of checkpoints that plain Orbax saved: `/adopt`."""

from typing import Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency

router: Final = page_router()


@router.get("/adopt")
def adopt_page(request: Request, caller: Reader, plane: PlaneDependency) -> HTMLResponse:
    """Show the form that asks for a folder and for the run to import it as."""
    return page(request, "runs/adopt.html", roots=caller.visible(plane.roots))
