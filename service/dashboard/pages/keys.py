"""API keys, to see, create and revoke: `/keys`."""

from typing import Final

from fastapi import Request, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import keys
from cairn.service.dashboard.form_fields import FormDependency, body_of, redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency
from cairn.service.routes.keys import KeyId
from cairn.service.schemas import KeyRequest, Scope

_DAY_SECONDS: Final = 86_400.0

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


@router.post("/keys")
def create_key_form(
    request: Request, caller: ServerAdministrator, plane: PlaneDependency, form: FormDependency
) -> HTMLResponse:
    """Create a key, and show it once."""
    days = form.decimal("expires_days")
    body = body_of(
        KeyRequest,
        name=form.text("name"),
        scope=form.text("scope") or "read",
        roots=form.texts("roots") or None,
        expires_seconds=None if days is None else days * _DAY_SECONDS,
    )
    new_key = keys.create_key(plane, caller, body)
    return page(request, "administration/new_key.html", made=new_key)


@router.post("/keys/{key}/revoke")
def revoke_key_form(caller: ServerAdministrator, key: KeyId, plane: PlaneDependency) -> Response:
    """Revoke a key."""
    keys.revoke_key(plane, caller, key)
    return redirect("/keys")
