"""API keys: list, create, revoke."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Response

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import keys
from cairn.service.dependencies import PlaneDependency
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import ID_PATTERN, KeyList, KeyRequest, NewKey

router: Final = APIRouter(prefix="/keys", tags=["keys"], route_class=PermittedRoute)

KeyId = Annotated[str, Path(pattern=ID_PATTERN, description="Id of a key, the part after `ck_`.")]


@router.get("")
def list_keys(caller: ServerAdministrator, plane: PlaneDependency) -> KeyList:
    """List all keys, without their secrets."""
    return KeyList(keys=keys.list_keys(plane))


@router.post("", status_code=201, responses=problem_responses(404, 409))
def create_key(
    caller: ServerAdministrator, body: KeyRequest, plane: PlaneDependency, response: Response
) -> NewKey:
    """Create a key. Only this answer contains it; the server stores a digest."""
    response.headers["Cache-Control"] = "no-store"
    return keys.create_key(plane, caller, body)


@router.delete("/{key}", status_code=204, responses=problem_responses(404))
def revoke_key(caller: ServerAdministrator, key: KeyId, plane: PlaneDependency) -> None:
    """Revoke a key for good. Every server refuses it within seconds."""
    keys.revoke_key(plane, caller, key)
