"""API documentation, to read and to try out: `/docs`."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.dashboard.rendering import page
from cairn.service.http.permitted_routes import PermittedRoute

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=PermittedRoute
)


@router.get("/docs")
def docs_page(request: Request, caller: Reader) -> HTMLResponse:
    """Show the operations of the API."""
    return page(request, "docs.html")
