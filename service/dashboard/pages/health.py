"""Health of the service and its stores: `/health`."""

from typing import Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import automations, root_health, schedules
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency
from cairn.service.errors import NotReadyError
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.routes import health

router: Final = page_router(PermittedRoute)


@router.get("/health")
def health_page(request: Request, caller: Reader, plane: PlaneDependency) -> HTMLResponse:
    """Show the parts of the service, stores, schedules and automations, and their problems."""
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
        schedules=schedules.list_schedules(plane, caller),
        automations=automations.list_automations(plane, caller),
        version=request.app.version,
    )
