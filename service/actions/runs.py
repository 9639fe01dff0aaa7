"""Runs: list, get, create, label.

If the catalog does not know a run, the store is read before a 404.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.catalog.queries import RunColumns
from cairn.service.errors import (
    RunExistsError,
)
from cairn.service.filters.search import Search
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import (
    Run,
)
from cairn.storage.errors import (
    PreconditionFailedError,
    RunNotFoundError,
)
from cairn.storage.runs import run as run_runs
from cairn.storage.runs.annotate import annotate_run
from cairn.storage.runs.records.run_info import RunInfo
from cairn.storage.runs.run import Run as StoredRun
from cairn.storage.store.uri import StoreURI

Key = tuple[Any, ...]
"""Sort key of the last entry before a page; (): the page is the first."""

EVERYTHING: Final = Search()


def list_runs(
    plane: ControlPlane,
    roots: Mapping[str, StoreURI],
    search: Search = EVERYTHING,
    *,
    after: Key,
    limit: int,
    refresh: bool,
) -> tuple[list[Run], Key]:
    """Return the next runs, and the key of the next page; (): it is the last page.

    Without an order in `search`, runs are sorted by root and name. Runs that are deleted meanwhile
    are left out, perhaps all of them; the key is valid nonetheless.

    Args:
        plane: The control plane.
        roots: Roots to read.
        search: Filter and order of the runs.
        after: Sort key of the last run that the client has; if `search` has no order, this is its
            root and name. (): start with the first.
        limit: Largest number of runs.
        refresh: Refresh first: the runs of this page, or, with a search, all runs.

    Raises:
        NotReadyError: A root is being read for the first time.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    if search:
        return _search_runs(plane, roots, search, after=after, limit=limit, refresh=refresh)
    if refresh:
        for root, uri in roots.items():
            plane.index.refresh_root(root, uri)
    else:
        plane.index.ensure_scanned(roots)
    until: Key = ()
    if refresh:
        with plane.catalog.query() as connection:
            rows = queries.runs(connection, roots, after=after, limit=limit + 1)
        plane.index.refresh_runs(roots, [(run.root, run.name) for run in rows[:limit]])
        until = _next_key(rows, limit)
    with plane.catalog.query() as connection:
        rows = queries.runs(connection, roots, after=after, until=until, limit=limit + 1)
    return [queries.run(run) for run in rows[:limit]], _next_key(rows, limit) or until


def _search_runs(
    plane: ControlPlane,
    roots: Mapping[str, StoreURI],
    search: Search,
    *,
    after: Key,
    limit: int,
    refresh: bool,
) -> tuple[list[Run], Key]:
    if refresh:  # after a change, any run may match the search
        for root, uri in roots.items():
            plane.index.scan(root, uri)
    else:
        plane.index.ensure_scanned(roots)
    with plane.catalog.query() as connection:
        rows = queries.search_runs(connection, roots, search, after=after, limit=limit + 1)
    end = rows[limit - 1][1] if len(rows) > limit else ()
    return [queries.run(run) for run, _ in rows[:limit]], end


def _next_key(rows: Sequence[RunColumns], limit: int) -> Key:
    """Return the key of a page's last run; (): it is the last page."""
    return (rows[limit - 1].root, rows[limit - 1].name) if len(rows) > limit else ()


def get_run(plane: ControlPlane, root: str, run: str, *, refresh: bool) -> Run:
    """Return a run.

    Raises:
        RunNotFoundError: There is no such run.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    with run_row(plane, root, run, refresh=refresh) as (_, row):
        return queries.run(row)


def create_run(
    plane: ControlPlane, caller: Caller, root: str, run: str, labels: Mapping[str, str]
) -> Run:
    """Create a run without steps, which a later training job writes to.

    Raises:
        UnknownRootError: There is no such root.
        InvalidURIError: The run's name is invalid.
        RunExistsError: The store has a run of this name.
        StoreUnavailableError: The root is not where it was, or does not answer.
        UnsupportedFormatError: Invalid labels; all are listed.
    """
    place = plane.place(root, run)
    with audited(plane, caller, "run.create", root=root, run=run, labels=dict(labels)) as entry:
        plane.index.refuse_gone(root, plane.root(root))
        try:
            stored_run = run_runs.create_run(place, labels=labels)
        except PreconditionFailedError as exc:
            raise RunExistsError(str(exc)) from exc
        entry.complete(after=stored_run.info().labels)
    return get_run(plane, root, run, refresh=True)


def annotate_run_labels(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    labels: Mapping[str, str | None],
    *,
    seen: Seen,
) -> Run:
    """Set labels of a run; others stay as they are.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        labels: Texts by name; None removes a label.
        seen: Version of the run that the change is based on.

    Raises:
        RunNotFoundError: There is no such run.
        ResourceChangedError: The run has changed since `seen`.
        UnsupportedFormatError: Invalid labels; all are listed.
    """
    stored_run = plane.run(root, run)
    current = get_run(plane, root, run, refresh=True)

    def check(info: RunInfo) -> None:
        seen.require(current.model_copy(update={"labels": info.labels}))

    with audited(plane, caller, "run.annotate", root=root, run=run, labels=dict(labels)) as entry:
        info = annotate_run(stored_run, labels, check=check)
        entry.complete(after=info.labels)
    return get_run(plane, root, run, refresh=True)


@contextmanager
def run_row(
    plane: ControlPlane, root: str, run: str, *, refresh: bool
) -> Iterator[tuple[Connection, RunColumns]]:
    """Open a connection, and find a run's row in the catalog; refresh the run if it is unknown."""
    uri = plane.place(root, run)
    if refresh:
        plane.index.refresh_run(root, StoredRun(uri))
    with plane.catalog.query() as connection:
        row = _find_row(connection, root, uri)
        if row is not None:
            yield connection, row
            return
    plane.index.look_for(root, StoredRun(uri))
    with plane.catalog.query() as connection:
        row = _find_row(connection, root, uri)
        if row is None:
            raise RunNotFoundError(
                "no such run", path=uri, expected="a run", found="one that was just deleted"
            )
        yield connection, row


def _find_row(connection: Connection, root: str, uri: StoreURI) -> RunColumns | None:
    row = queries.find_run(connection, root, uri.name)
    return row if row is not None and row.uri == str(uri) else None
