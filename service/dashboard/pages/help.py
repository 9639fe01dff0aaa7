"""Help with the words that pages use, and with the API: `/help`, `/docs`."""

from typing import Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.glossary import GLOSSARY
from cairn.service.http.permitted_routes import PermittedRoute

router: Final = page_router(PermittedRoute)


@router.get("/help")
def help_page(request: Request, caller: Reader) -> HTMLResponse:
    """Explain the terms of Cairn."""
    return page(request, "help.html", glossary=sorted(GLOSSARY.items()))


@router.get("/docs")
def docs_page(request: Request, caller: Reader) -> HTMLResponse:
    """Show the operations of the API."""
    return page(request, "docs.html")
