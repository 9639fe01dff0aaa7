"""Roots and runs."""

from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter

from cairn.service import actions
from cairn.service.dependencies import (
    IndexDependency,
    PageSize,
    PageToken,
    Refresh,
    RootName,
    RunURIDependency,
    SettingsDependency,
    root_uri,
)
from cairn.service.http import StoreRoute, decode_token, encode_token, problem_responses
from cairn.service.schemas import Root, RootList, Run, RunList
from cairn.storage.store import StoreURI

router: Final = APIRouter(tags=["runs"], route_class=StoreRoute)


@router.get("/roots")
def list_roots(settings: SettingsDependency) -> RootList:
    """Every store root of this server."""
    uris = settings.root_uris
    return RootList(roots=[Root(name=name, uri=str(uri)) for name, uri in uris.items()])


@router.get("/runs")
def list_all_runs(
    settings: SettingsDependency,
    index: IndexDependency,
    page_size: PageSize = 50,
    page_token: PageToken = None,
    refresh: Refresh = False,
) -> RunList:
    """Runs of every root, by root and name."""
    return _page(index, settings.root_uris, "runs", page_size, page_token, refresh=refresh)


@router.get("/roots/{root}/runs", responses=problem_responses(404))
def list_runs(
    root: RootName,
    settings: SettingsDependency,
    index: IndexDependency,
    page_size: PageSize = 50,
    page_token: PageToken = None,
    refresh: Refresh = False,
) -> RunList:
    """Runs of one root, by name."""
    roots = {root: root_uri(settings, root)}
    return _page(index, roots, f"runs of {root}", page_size, page_token, refresh=refresh)


@router.get("/roots/{root}/runs/{run}", responses=problem_responses(404))
def get_run(
    root: RootName, uri: RunURIDependency, index: IndexDependency, refresh: Refresh = False
) -> Run:
    """One run."""
    return actions.get_run(index, root, uri, refresh=refresh)


def _page(
    index: IndexDependency,
    roots: Mapping[str, StoreURI],
    listing: str,
    page_size: int,
    token: str | None,
    *,
    refresh: bool,
) -> RunList:
    after = decode_token(listing, token, kinds=(str, str))
    runs, more = actions.list_runs(index, roots, after=after, limit=page_size, refresh=refresh)
    last = (runs[-1].root, runs[-1].name) if more else None
    return RunList(runs=runs, next_page_token=None if last is None else encode_token(listing, last))
