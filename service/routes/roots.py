"""Store roots: those in the settings, and those added while servers run."""

from typing import Final

from fastapi import APIRouter, Request, Response

from cairn.service.access.permission import Reader, ServerAdministrator
from cairn.service.actions import roots
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.http.answers import NOT_CHANGED, created_answer, tagged_answer
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.http.preconditions import Condition
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import AddRootRequest, Root, RootList

router: Final = APIRouter(prefix="/roots", tags=["roots"], route_class=StoreRoute)


@router.get("")
def list_roots(caller: Reader, plane: PlaneDependency) -> RootList:
    """List the store roots of this server, and where each is configured."""
    return RootList(roots=roots.list_roots(plane, caller))


@router.post("", status_code=201, response_model=Root, responses=problem_responses(409))
def add_root(
    caller: ServerAdministrator,
    body: AddRootRequest,
    plane: PlaneDependency,
    request: Request,
) -> Response:
    """Add a root for every server and worker of this catalog, now and after restarts.

    The folder or bucket must exist and must not overlap another root. Nothing is written to it.
    Only administrators of all roots may add one.
    """
    added = roots.add_root(plane, caller, body.name, body.uri, adopt_from=body.adopt_from)
    return created_answer(added, f"{request.url.path}/{added.name}")


@router.get("/{root}", response_model=Root, responses={304: NOT_CHANGED, **problem_responses(404)})
def get_root(
    caller: Reader, root: RootName, plane: PlaneDependency, if_none_match: Condition = None
) -> Response:
    """Get a root."""
    return tagged_answer(roots.get_root(plane, root), if_none_match)


def remove_root(caller: ServerAdministrator, root: RootName, plane: PlaneDependency) -> None:
    """Remove an added root from service. Its store stays as it is.

    The request is refused (409) if the settings name the root, or while operations on it have not
    ended. Only administrators of all roots may remove one.
    """
    roots.remove_root(plane, caller, root)


router.add_api_route(
    "/{root}",
    remove_root,
    methods=["DELETE"],
    status_code=204,
    responses=problem_responses(404, 409),
    route_class_override=PermittedRoute,  # no limiter: a root of a dead store can be removed
)
