"""Form routes of roots: add, remove."""

from typing import Final

from fastapi import Response

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import roots
from cairn.service.dashboard.forms.fields import FormDependency, body_of, redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.schemas import AddRootRequest

router: Final = page_router()


@router.post("/health/roots")
def add_root_form(
    caller: ServerAdministrator, plane: PlaneDependency, form: FormDependency
) -> Response:
    """Add a root while the server runs."""
    body = body_of(AddRootRequest, name=form.text("name"), uri=form.text("uri"))
    roots.add_root(plane, caller, body.name, body.uri)
    return redirect("/health")


def remove_root_form(
    caller: ServerAdministrator, root: RootName, plane: PlaneDependency
) -> Response:
    """Remove an added root from service. Its store stays as it is."""
    roots.remove_root(plane, caller, root)
    return redirect("/health")


router.add_api_route(
    "/health/roots/{root}/remove",
    remove_root_form,
    methods=["POST"],
    route_class_override=PermittedRoute,  # no limiter: a root of a dead store can be removed
)
