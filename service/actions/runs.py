"""Runs: list, get, create, label.

If the catalog does not know a run, the store is read before a 404.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
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
from cairn.service.filters.completion import Completion, PartialPath
from cairn.service.filters.expressions import Path
from cairn.service.filters.fields import METRIC_FIELDS, RUN_FIELDS
from cairn.service.filters.search import EVERYTHING, Search
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import Run, RunColumn
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

MAX_COMPLETIONS: Final = 12
"""Largest number of completions of a field."""

COMPLETED_RUNS: Final = 500
"""Number of newest runs whose labels and configs are offered as completions."""

_MEMBERS_FIRST: Final = ("best", "metrics", "labels", "config")


def list_runs(
    plane: ControlPlane,
    roots: Mapping[str, StoreURI],
    search: Search = EVERYTHING,
    *,
    after: Key,
    limit: int,
    refresh: bool,
    columns: Sequence[Path] = (),
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
        columns: Metrics, config values and labels to add to each run.

    Raises:
        NotReadyError: A root is being read for the first time.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    if search:
        return _search_runs(
            plane, roots, search, after=after, limit=limit, refresh=refresh, columns=columns
        )
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
        cells = queries.run_cells(connection, rows[:limit], columns)
    return list(map(queries.run, rows, cells)), _next_key(rows, limit) or until


def _search_runs(
    plane: ControlPlane,
    roots: Mapping[str, StoreURI],
    search: Search,
    *,
    after: Key,
    limit: int,
    refresh: bool,
    columns: Sequence[Path],
) -> tuple[list[Run], Key]:
    if refresh:  # after a change, any run may match the search
        for root, uri in roots.items():
            plane.index.scan(root, uri)
    else:
        plane.index.ensure_scanned(roots)
    with plane.catalog.query() as connection:
        rows = queries.search_runs(connection, roots, search, after=after, limit=limit + 1)
        runs = [run for run, _ in rows[:limit]]
        cells = queries.run_cells(connection, runs, columns)
    end = rows[limit - 1][1] if len(rows) > limit else ()
    return list(map(queries.run, runs, cells)), end


def run_columns(
    plane: ControlPlane, runs: Sequence[Run], paths: Sequence[Path] = (), *, common: int = 0
) -> tuple[tuple[Path, ...], list[list[RunColumn]]]:
    """Return the columns of a page of runs, and the values of each run.

    Args:
        plane: The control plane.
        runs: Runs of the page. A run that was just deleted has no values.
        paths: Metrics, config values and labels; empty: the metrics that most of the runs have.
        common: Largest number of metrics, if `paths` is empty.
    """
    with plane.catalog.query() as connection:
        rows = queries.run_rows(connection, [(run.root, run.name) for run in runs])
        if not paths and common:
            named = queries.common_metrics(connection, list(rows.values()), common)
            paths = [Path("best" if has_best else "metrics", name) for name, has_best in named]
        cells = queries.run_cells(connection, list(rows.values()), paths)
    of_run = dict(zip(rows, cells, strict=True))
    none = [RunColumn(field=path.text) for path in paths]
    return tuple(paths), [of_run.get((run.root, run.name), none) for run in runs]


def complete_field(
    plane: ControlPlane, roots: Iterable[str], text: str, *, keyed_only: bool
) -> Completion:
    """Return what may stand in place of the last, unfinished field of a filter or of columns.

    Args:
        plane: The control plane.
        roots: Names of the roots whose runs the caller may read.
        text: Filter or columns up to the cursor.
        keyed_only: Fields that have no named members can't follow, as in columns.
    """
    partial = PartialPath.at_end(text)
    if partial is None:
        return Completion(start=len(text), options=[])
    fields = [name for name, field in RUN_FIELDS.items() if field.keyed or not keyed_only]
    options = [] if partial.key is not None else partial.matching(fields)
    with plane.catalog.query() as connection:

        def members(field: str, part: str) -> list[str]:
            if field in METRIC_FIELDS:
                names = queries.metric_names(connection, roots, part, MAX_COMPLETIONS)
            else:
                names = queries.entry_names(connection, roots, field, COMPLETED_RUNS)
                names = [name for name in names if part.lower() in name.lower()]
            return [Path(field, name).text for name in names[:MAX_COMPLETIONS]]

        if partial.key is None and partial.field:
            lists = [members(field, partial.field) for field in _MEMBERS_FIRST]
            options += [option for some in zip_longest(*lists) for option in some if option]
        elif partial.key is not None and partial.field in _MEMBERS_FIRST:
            options += members(partial.field, partial.key)
    return Completion(start=partial.start, options=options[:MAX_COMPLETIONS])


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
