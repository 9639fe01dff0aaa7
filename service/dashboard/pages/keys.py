"""Page of API keys: `/keys`."""

from typing import Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import keys
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency
from cairn.service.schemas import Scope

router: Final = page_router()


@router.get("/keys")
def keys_page(
    request: Request, caller: ServerAdministrator, plane: PlaneDependency
) -> HTMLResponse:
    """Show the API keys and their permissions."""
    return page(
        request,
        "administration/keys.html",
        keys=keys.list_keys(plane),
        scopes=list(Scope),
        roots=list(plane.roots),
        needed=plane.settings.auth == "keys",
    )
