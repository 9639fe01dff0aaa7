"""Runs, checkpoints and aliases as the catalog has them; read from the store anew if that is asked.

What the catalog does not know is looked for in the store before it is said not to exist.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import deletion_body, queries, read_deletions
from cairn.service.catalog.queries import RunColumns
from cairn.service.filters import Search
from cairn.service.schemas import Alias, Checkpoint, CheckpointState, Run, States
from cairn.storage.errors import AliasNotFoundError, RunNotFoundError, StepChangedError
from cairn.storage.runs import Run as StoredRun
from cairn.storage.runs import StepInfo, StepState
from cairn.storage.store import StoreURI, from_rfc3339

Key = tuple[Any, ...]
"""Where a page begins: after the entry of this key; (): at the first."""

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
    """The next runs, by root and name; after which key there are more, () if there are none.

    Runs that go meanwhile are left out, maybe all of them; the key is that of the page anyway.

    Args:
        plane: Where.
        roots: Those that are meant.
        search: Which of their runs, and in what other order.
        after: Key of the last one that is known already; without another order its root and name.
        limit: At most so many.
        refresh: Look at the store first: at this page, or if some are searched for, at all runs.

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
    if refresh:  # any run may have become one that is searched for
        for root, uri in roots.items():
            plane.index.scan(root, uri)
    else:
        plane.index.ensure_scanned(roots)
    with plane.catalog.query() as connection:
        found = queries.search_runs(connection, roots, search, after=after, limit=limit + 1)
    end = found[limit - 1][1] if len(found) > limit else ()
    return [queries.run(run) for run, _ in found[:limit]], end


def _end(found: Sequence[RunColumns], limit: int) -> Key:
    """The key of a page's last run; () if there are no more."""
    return (found[limit - 1].root, found[limit - 1].name) if len(found) > limit else ()


def get_run(plane: ControlPlane, root: str, run: str, *, refresh: bool) -> Run:
    """One run.

    Raises:
        RunNotFoundError: There is none.
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
    """The next checkpoints of a run, highest step first; after which key there are more, or ().

    Args:
        plane: Where.
        root: Name of the run's root.
        run: Name of the run.
        search: Which of its checkpoints, and in what other order.
        state: Which of them, whatever the search says.
        after: Key of the last one that is known already; without another order its step and
            attempt.
        limit: At most so many.
        refresh: Look at the store first.

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
    """One step, whatever its state.

    Args:
        plane: Where.
        root: Name of the run's root.
        run: Name of the run.
        step: Its number.
        attempt: Of several attempts at it this one; None: the one that is listed, or the last.
        refresh: Look at the store first.

    Raises:
        RunNotFoundError, StepNotFoundError: There is none.
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
    """Aliases of a run, by name.

    Raises:
        RunNotFoundError: There is no such run.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    with _found(plane, root, run, refresh=refresh) as (connection, known):
        return queries.aliases(connection, known)


def get_alias(plane: ControlPlane, root: str, run: str, alias: str, *, refresh: bool) -> Alias:
    """One alias.

    Raises:
        RunNotFoundError, AliasNotFoundError: There is none.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    for found in list_aliases(plane, root, run, refresh=refresh):
        if found.alias == alias:
            return found
    if not refresh:
        return get_alias(plane, root, run, alias, refresh=True)
    uri = plane.place(root, run)
    StoredRun(uri).aliases.require(alias)  # says what there is, and what is wrong with it
    raise AliasNotFoundError(
        "no such alias", path=uri, expected=alias, found="one that was set just now"
    )


@contextmanager
def _found(
    plane: ControlPlane, root: str, run: str, *, refresh: bool
) -> Iterator[tuple[Connection, RunColumns]]:
    """A run that is known, or was found in the store, and a connection to ask on about it."""
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
    """A step that the catalog leaves out, as its manifest can't be read."""
    if attempt is None:
        return _body(row, run, run.step(step))  # raises, unless it was published just now
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
    """Raise if a listed step is not that of the attempt that is meant; None: any is.

    Raises:
        StepChangedError: It is another's.
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
