"""Aliases of a run: list, get, delete, and the history of moves."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.access.permission import Operator, Reader
from cairn.service.actions import aliases as aliases_actions
from cairn.service.dependencies import AliasName, PlaneDependency, Refresh, RootName, RunName
from cairn.service.http.answers import NOT_CHANGED
from cairn.service.http.entity_tags import etag, names_etag
from cairn.service.http.limited_routes import StoreReadRoute, StoreRoute
from cairn.service.http.preconditions import Condition, LastSeenDependency
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import Alias, AliasHistory, AliasList

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/aliases", tags=["aliases"], route_class=StoreRoute
)


@router.get("", responses=problem_responses(404))
def list_aliases(
    caller: Reader, root: RootName, run: RunName, plane: PlaneDependency, refresh: Refresh = False
) -> AliasList:
    """List the aliases of a run, by name."""
    return AliasList(aliases=aliases_actions.list_aliases(plane, root, run, refresh=refresh))


@router.get(
    "/{alias}",
    response_model=Alias,
    responses={304: NOT_CHANGED, **problem_responses(404)},
)
def get_alias(
    caller: Reader,
    root: RootName,
    run: RunName,
    alias: AliasName,
    plane: PlaneDependency,
    response: Response,
    refresh: Refresh = False,
    if_none_match: Condition = None,
) -> Alias | Response:
    """Get an alias. Send its ETag as the `If-Match` of a promotion."""
    body = aliases_actions.get_alias(plane, root, run, alias, refresh=refresh)
    tag = etag(body.sequence)
    if names_etag(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return body


@router.delete("/{alias}", status_code=204, responses=problem_responses(404, 412, 428))
def remove_alias(
    caller: Operator,
    root: RootName,
    run: RunName,
    alias: AliasName,
    expect: LastSeenDependency,
    plane: PlaneDependency,
) -> None:
    """Delete an alias if it has not moved since the caller read it. Its history stays."""
    aliases_actions.delete_alias(plane, caller, root, run, alias, expect=expect)


def get_alias_history(
    caller: Reader, root: RootName, run: RunName, alias: AliasName, plane: PlaneDependency
) -> AliasHistory:
    """List the moves of an alias, newest first. The list outlives the alias."""
    return aliases_actions.alias_history(plane, root, run, alias)


router.add_api_route(
    "/{alias}/history",
    get_alias_history,
    responses=problem_responses(404),
    route_class_override=StoreReadRoute,
)
