"""Roots and runs."""

from typing import Final

from fastapi import APIRouter

from cairn.service.catalog import queries
from cairn.service.dependencies import (
    IndexDependency,
    PageSize,
    PageToken,
    RootName,
    RunDependency,
    SettingsDependency,
    root_uri,
)
from cairn.service.http import decode_token, encode_token, problem_responses
from cairn.service.schemas import Root, RootList, Run, RunList
from cairn.storage.errors import RunNotFoundError
from cairn.storage.store import StoreURI

router: Final = APIRouter(tags=["runs"])


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
) -> RunList:
    """Runs of every root, by root and name."""
    return _page(index, settings.root_uris, "runs", page_size, page_token)


@router.get("/roots/{root}/runs", responses=problem_responses(404))
def list_runs(
    root: RootName,
    settings: SettingsDependency,
    index: IndexDependency,
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> RunList:
    """Runs of one root, by name."""
    roots = {root: root_uri(settings, root)}
    return _page(index, roots, f"runs of {root}", page_size, page_token)


@router.get("/roots/{root}/runs/{run}", responses=problem_responses(404))
def get_run(root: RootName, run: RunDependency, index: IndexDependency) -> Run:
    """One run."""
    index.refresh_run(root, run)
    with index.catalog.read() as session:
        found = queries.runs(session, [(root, run.uri.name)])
    if not found:
        raise RunNotFoundError(
            "no such run", path=run.uri, expected="a run", found="one that was just deleted"
        )
    return found[0]


def _page(
    index: IndexDependency,
    roots: dict[str, StoreURI],
    listing: str,
    page_size: int,
    token: str | None,
) -> RunList:
    start = decode_token(listing, token, kinds=(str, str))
    for root, uri in roots.items():
        index.refresh_root(root, uri)
    with index.catalog.read() as session:
        names = queries.run_names(session, roots, start, page_size + 1)
    index.refresh_runs(roots, names[:page_size])
    with index.catalog.read() as session:
        found = queries.runs(session, names[:page_size])
    more = len(names) > page_size
    return RunList(
        runs=found, next_page_token=encode_token(listing, names[page_size - 1]) if more else None
    )
