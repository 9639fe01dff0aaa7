"""Health of the service and its roots, which can be added and removed: `/health`."""

from typing import Final

from fastapi import Request, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader, ServerAdministrator
from cairn.service.actions import root_health, roots
from cairn.service.dashboard.form_fields import FormDependency, body_of, redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.errors import NotReadyError
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.routes import health
from cairn.service.schemas import AddRootRequest

router: Final = page_router(PermittedRoute)
store_router: Final = page_router()


@router.get("/health")
def health_page(request: Request, caller: Reader, plane: PlaneDependency) -> HTMLResponse:
    """Show the parts of the service and the stores, and their problems."""
    problems: dict[str, str] = {}
    checks: dict[str, str] = {}
    try:
        checks = health.ready(request, plane).checks
    except NotReadyError as exc:
        problems = {error["field"]: error["detail"] for error in exc.errors or ()}
        problems = problems or {"service": exc.detail}
    return page(
        request,
        "administration/health.html",
        problems=problems,
        parts=[name for name, state in checks.items() if state == "ok"],
        roots=root_health.root_health(plane, caller),
        version=request.app.version,
    )


@store_router.post("/health/roots")
def add_root_form(
    caller: ServerAdministrator, plane: PlaneDependency, form: FormDependency
) -> Response:
    """Add a root while the server runs."""
    body = body_of(AddRootRequest, name=form.text("name"), uri=form.text("uri"))
    roots.add_root(plane, caller, body.name, body.uri)
    return redirect("/health")


# No limiter: a root of a dead store can be removed.
@router.post("/health/roots/{root}/remove")
def remove_root_form(
    caller: ServerAdministrator, root: RootName, plane: PlaneDependency
) -> Response:
    """Remove an added root from service. Its store stays as it is."""
    roots.remove_root(plane, caller, root)
    return redirect("/health")
