"""Lists of runs, checkpoints and aliases from the catalog, refreshed from the store on request.

If the catalog does not know a run or step, the store is read before a 404.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.catalog.notes import deletion_body, read_deletions
from cairn.service.catalog.queries import RunColumns
from cairn.service.filters.search import Search
from cairn.service.schemas import Alias, Checkpoint, CheckpointState, Run, States
from cairn.storage.errors import AliasNotFoundError, RunNotFoundError, StepChangedError
from cairn.storage.runs.run import Run as StoredRun
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.store.clock import from_rfc3339
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
    """Return the next runs, by root and name, and the key of the next page, () without one.

    Runs that are deleted meanwhile are left out, perhaps all of them; the key is valid nonetheless.

    Args:
        plane: The control plane.
        roots: Roots to read.
        search: Filter and order of the runs.
        after: Sort key of the last run that the client has; without an order its root and name.
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
            found = queries.runs(connection, roots, after=after, limit=limit + 1)
        plane.index.refresh_runs(roots, [(run.root, run.name) for run in found[:limit]])
        until = _end(found, limit)
    with plane.catalog.query() as connection:
        found = queries.runs(connection, roots, after=after, until=until, limit=limit + 1)
    return [queries.run(run) for run in found[:limit]], _end(found, limit) or until


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
        found = queries.search_runs(connection, roots, search, after=after, limit=limit + 1)
    end = found[limit - 1][1] if len(found) > limit else ()
    return [queries.run(run) for run, _ in found[:limit]], end


def _end(found: Sequence[RunColumns], limit: int) -> Key:
    """Return the key of a page's last run; (): it is the last page."""
    return (found[limit - 1].root, found[limit - 1].name) if len(found) > limit else ()


def get_run(plane: ControlPlane, root: str, run: str, *, refresh: bool) -> Run:
    """Return a run.

    Raises:
        RunNotFoundError: There is no such run.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    with _found(plane, root, run, refresh=refresh) as (_, known):
        return queries.run(known)


def list_checkpoints(
    plane: ControlPlane,
    root: str,
    run: str,
    search: Search = EVERYTHING,
    *,
    state: States,
    after: Key,
    limit: int,
    refresh: bool,
) -> tuple[list[Checkpoint], Key]:
    """Return a run's next checkpoints, highest first, and the key of the next page, or ().

    Args:
        plane: The control plane.
        root: Name of the run's root.
        run: Name of the run.
        search: Filter and order of the checkpoints.
        state: States to return, in addition to the filter.
        after: Sort key of the last checkpoint that the client has; without an order its step and
            attempt.
        limit: Largest number of checkpoints.
        refresh: Refresh the run first.

    Raises:
        RunNotFoundError: There is no such run.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    more = limit + 1
    with _found(plane, root, run, refresh=refresh) as (connection, known):
        if search:
            searched = queries.search_checkpoints(
                connection, known, search, state=state, after=after, limit=more
            )
            found, keys = [one for one, _ in searched], [key for _, key in searched]
        else:
            found = queries.checkpoints(connection, known, state=state, before=after, limit=more)
            keys = [(one.step, one.attempt) for one in found]
        named = queries.alias_names(connection, known, found)
        page = [queries.checkpoint(known, one, named) for one in found[:limit]]
    return page, keys[limit - 1] if len(found) > limit else ()


def get_checkpoint(
    plane: ControlPlane,
    root: str,
    run: str,
    step: int,
    *,
    attempt: int | None = None,
    refresh: bool,
) -> Checkpoint:
    """Return a step in any state.

    Args:
        plane: The control plane.
        root: Name of the run's root.
        run: Name of the run.
        step: Number of the step.
        attempt: Attempt that saved the step; None: the listed one, or else the last.
        refresh: Refresh the run first.

    Raises:
        RunNotFoundError, StepNotFoundError: There is no such run or step.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    with _found(plane, root, run, refresh=refresh) as (connection, known):
        attempts = queries.attempts(connection, known, step)
        saved = {one.attempt: one for one in attempts}
        listed = [one.attempt for one in attempts if one.state == CheckpointState.LISTED]
        if attempt is None and saved:
            attempt = listed[0] if listed else max(saved)
        if attempt in saved:
            named = queries.alias_names(connection, known, attempts)
            return queries.checkpoint(known, saved[attempt], named)
    if not refresh:
        return get_checkpoint(plane, root, run, step, attempt=attempt, refresh=True)
    return _from_store(known, StoredRun(plane.place(root, run)), step, attempt)


def list_aliases(plane: ControlPlane, root: str, run: str, *, refresh: bool) -> list[Alias]:
    """Return the aliases of a run, by name.

    Raises:
        RunNotFoundError: There is no such run.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    with _found(plane, root, run, refresh=refresh) as (connection, known):
        return queries.aliases(connection, known)


def get_alias(plane: ControlPlane, root: str, run: str, alias: str, *, refresh: bool) -> Alias:
    """Return an alias.

    Raises:
        RunNotFoundError, AliasNotFoundError: There is no such run or alias.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    for found in list_aliases(plane, root, run, refresh=refresh):
        if found.alias == alias:
            return found
    if not refresh:
        return get_alias(plane, root, run, alias, refresh=True)
    uri = plane.place(root, run)
    StoredRun(uri).aliases.require(alias)  # raises with the existing names, or the record's damage
    raise AliasNotFoundError(
        "no such alias", path=uri, expected=alias, found="one that was set just now"
    )


@contextmanager
def _found(
    plane: ControlPlane, root: str, run: str, *, refresh: bool
) -> Iterator[tuple[Connection, RunColumns]]:
    """Open a connection, and find a run's row in the catalog; refresh the run if it is unknown."""
    uri = plane.place(root, run)
    if refresh:
        plane.index.refresh_run(root, StoredRun(uri))
    with plane.catalog.query() as connection:
        known = _known(connection, root, uri)
        if known is not None:
            yield connection, known
            return
    plane.index.look_for(root, StoredRun(uri))
    with plane.catalog.query() as connection:
        known = _known(connection, root, uri)
        if known is None:
            raise RunNotFoundError(
                "no such run", path=uri, expected="a run", found="one that was just deleted"
            )
        yield connection, known


def _known(connection: Connection, root: str, uri: StoreURI) -> RunColumns | None:
    found = queries.find_run(connection, root, uri.name)
    return found if found is not None and found.uri == str(uri) else None


def _from_store(row: RunColumns, run: StoredRun, step: int, attempt: int | None) -> Checkpoint:
    """Return a step that the catalog leaves out because its manifest is unreadable."""
    if attempt is None:
        return _body(row, run, run.step(step))  # raises, unless the step was published just now
    deletions = read_deletions(run, [(step, attempt)])
    held = run.step_attempts().get(step) == attempt
    kept = StepState.LISTED if held else StepState.SET_ASIDE
    body = _body(row, run, StepInfo(step, attempt, StepState.TRASHED if deletions else kept))
    tombstone = deletions.get((step, attempt))
    deletion = None if tombstone is None else deletion_body(tombstone)
    return body.model_copy(update={"deletion": deletion})


def _body(row: RunColumns, run: StoredRun, info: StepInfo) -> Checkpoint:
    return Checkpoint(
        root=row.root,
        run=row.name,
        step=info.step,
        attempt=info.attempt,
        state=CheckpointState(info.state.value),
        uri=info.source or str(run.step_uri(info)),
        created=None if info.created is None else from_rfc3339(info.created),
        bytes=info.nbytes,
        leaves=None,
        items=[],
        iterators={},
        manifest_digest=info.manifest_digest,
        model_type=None,
        aliases=[],
        labels={},
        metrics={},
        better={},
    )


def refuse_other(run: StoredRun, listed: StepInfo, attempt: int | None) -> None:
    """Raise unless `attempt` saved a listed step; None: any attempt may have.

    Raises:
        StepChangedError: Another attempt saved it.
    """
    if attempt in (None, listed.attempt):
        return
    raise StepChangedError(
        "the step was saved anew",
        path=run.step_uri(listed),
        expected=f"step {listed.step} of attempt {attempt}, as it was seen",
        found=f"that of attempt {listed.attempt}",
        next_step="Look at the new one, and ask again if it is what you want.",
    )
