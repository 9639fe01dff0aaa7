"""Aliases of a run: where they point, where they pointed, and their end."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service import actions
from cairn.service.catalog import note_alias
from cairn.service.dependencies import (
    AliasName,
    CatalogDependency,
    IndexDependency,
    Refresh,
    RootName,
    RunDependency,
    RunURIDependency,
)
from cairn.service.errors import InvalidRequestError
from cairn.service.http import (
    ActorDependency,
    ExpectationDependency,
    StoreReadRoute,
    StoreRoute,
    etag,
    problem_responses,
)
from cairn.service.schemas import Alias, AliasHistory, AliasList, AliasMove
from cairn.storage.store import from_rfc3339

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/aliases", tags=["aliases"], route_class=StoreRoute
)


@router.get("", responses=problem_responses(404))
def list_aliases(
    root: RootName, uri: RunURIDependency, index: IndexDependency, refresh: Refresh = False
) -> AliasList:
    """Aliases of a run, by name."""
    return AliasList(aliases=actions.list_aliases(index, root, uri, refresh=refresh))


@router.get("/{alias}", responses=problem_responses(404))
def get_alias(
    root: RootName,
    uri: RunURIDependency,
    alias: AliasName,
    index: IndexDependency,
    response: Response,
    refresh: Refresh = False,
) -> Alias:
    """One alias; its ETag is what a promotion gives back in If-Match."""
    found = actions.get_alias(index, root, uri, alias, refresh=refresh)
    response.headers["ETag"] = etag(found.sequence)
    return found


@router.delete("/{alias}", status_code=204, responses=problem_responses(404, 412, 428))
def remove_alias(
    root: RootName,
    run: RunDependency,
    alias: AliasName,
    expect: ExpectationDependency,
    actor: ActorDependency,
    catalog: CatalogDependency,
) -> None:
    """Delete an alias that is still as last seen; its history stays."""
    if expect.sequence is None:
        field, detail = "header.if-none-match", "a deletion needs If-Match with the alias's ETag"
        raise InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])
    tombstone = actions.delete_alias(run, alias, by=actor, expect=expect.sequence)
    note_alias(catalog, root=root, run=run, actor=actor, alias=tombstone)


def get_alias_history(run: RunDependency, alias: AliasName) -> AliasHistory:
    """Moves of an alias, newest first, also after its deletion."""
    events = [
        AliasMove(**event.model_dump(exclude={"at"}), at=from_rfc3339(event.at))
        for event in run.aliases.history(alias)
    ]
    return AliasHistory(alias=alias, events=events)


router.add_api_route(
    "/{alias}/history",
    get_alias_history,
    responses=problem_responses(404),
    route_class_override=StoreReadRoute,
)
