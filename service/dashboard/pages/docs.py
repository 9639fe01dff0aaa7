"""API documentation, to read and to try out: `/docs`."""

from typing import Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.http.permitted_routes import PermittedRoute

router: Final = page_router(PermittedRoute)


@router.get("/docs")
def docs_page(request: Request, caller: Reader) -> HTMLResponse:
    """Show the operations of the API."""
    return page(request, "docs.html")
