"""Runs, over all roots or in one."""

from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.actions import ControlPlane
from cairn.service.dependencies import (
    PageSize,
    PageToken,
    PlaneDependency,
    Refresh,
    RootName,
    RunName,
)
from cairn.service.http import StoreRoute, decode_token, encode_token, named, problem_responses
from cairn.service.schemas import Root, RootList, Run, RunList
from cairn.storage.store import StoreURI

router: Final = APIRouter(tags=["runs"], route_class=StoreRoute)


@router.get("/roots")
def list_roots(caller: Reader, plane: PlaneDependency) -> RootList:
    """Every store root of this server."""
    seen = caller.visible(plane.roots)
    return RootList(roots=[Root(name=name, uri=str(uri)) for name, uri in seen.items()])


@router.get("/runs")
def list_all_runs(
    caller: Reader,
    plane: PlaneDependency,
    page_size: PageSize = 50,
    page_token: PageToken = None,
    refresh: Refresh = False,
) -> RunList:
    """Runs of every root, by root and name."""
    roots = caller.visible(plane.roots)
    return _page(plane, roots, "runs", page_size, page_token, refresh=refresh)


@router.get("/roots/{root}/runs", responses=problem_responses(404))
def list_runs(
    caller: Reader,
    root: RootName,
    plane: PlaneDependency,
    page_size: PageSize = 50,
    page_token: PageToken = None,
    refresh: Refresh = False,
) -> RunList:
    """Runs of one root, by name."""
    roots = {root: plane.root(root)}
    return _page(plane, roots, f"runs of {root}", page_size, page_token, refresh=refresh)


@router.get("/roots/{root}/runs/" + named("run"), responses=problem_responses(404))
def get_run(
    caller: Reader, root: RootName, run: RunName, plane: PlaneDependency, refresh: Refresh = False
) -> Run:
    """One run."""
    return actions.get_run(plane, root, run, refresh=refresh)


def _page(
    plane: ControlPlane,
    roots: Mapping[str, StoreURI],
    listing: str,
    page_size: int,
    token: str | None,
    *,
    refresh: bool,
) -> RunList:
    after = decode_token(listing, token, kinds=(str, str))
    runs, last = actions.list_runs(plane, roots, after=after, limit=page_size, refresh=refresh)
    return RunList(runs=runs, next_page_token=encode_token(listing, last) if last else None)
