"""Aliases of a run: where they point, where they pointed, and their end."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service import actions
from cairn.service.access import Operator, Reader
from cairn.service.dependencies import AliasName, PlaneDependency, Refresh, RootName, RunName
from cairn.service.errors import InvalidRequestError
from cairn.service.http import (
    ExpectationDependency,
    StoreReadRoute,
    StoreRoute,
    etag,
    problem_responses,
)
from cairn.service.schemas import Alias, AliasHistory, AliasList

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/aliases", tags=["aliases"], route_class=StoreRoute
)


@router.get("", responses=problem_responses(404))
def list_aliases(
    caller: Reader, root: RootName, run: RunName, plane: PlaneDependency, refresh: Refresh = False
) -> AliasList:
    """Aliases of a run, by name."""
    return AliasList(aliases=actions.list_aliases(plane, root, run, refresh=refresh))


@router.get("/{alias}", responses=problem_responses(404))
def get_alias(
    caller: Reader,
    root: RootName,
    run: RunName,
    alias: AliasName,
    plane: PlaneDependency,
    response: Response,
    refresh: Refresh = False,
) -> Alias:
    """One alias; its ETag is what a promotion gives back in If-Match."""
    found = actions.get_alias(plane, root, run, alias, refresh=refresh)
    response.headers["ETag"] = etag(found.sequence)
    return found


@router.delete("/{alias}", status_code=204, responses=problem_responses(404, 412, 428))
def remove_alias(
    caller: Operator,
    root: RootName,
    run: RunName,
    alias: AliasName,
    expect: ExpectationDependency,
    plane: PlaneDependency,
) -> None:
    """Delete an alias that is still as last seen; its history stays."""
    if expect.sequence is None:
        field, detail = "header.if-none-match", "a deletion needs If-Match with the alias's ETag"
        raise InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])
    actions.delete_alias(plane, caller, root, run, alias, expect=expect.sequence)


def get_alias_history(
    caller: Reader, root: RootName, run: RunName, alias: AliasName, plane: PlaneDependency
) -> AliasHistory:
    """Moves of an alias, newest first, also after its deletion."""
    return actions.alias_history(plane, root, run, alias)


router.add_api_route(
    "/{alias}/history",
    get_alias_history,
    responses=problem_responses(404),
    route_class_override=StoreReadRoute,
)
