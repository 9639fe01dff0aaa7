"""Aliases: list, get, promote, delete, history."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.checkpoints import require_attempt
from cairn.service.actions.gates import Candidate, gates_of, require_gates
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.runs import run_row
from cairn.service.catalog import queries, rows
from cairn.service.catalog.events.lost_records import alias_event
from cairn.service.errors import AliasMovedError
from cairn.service.schemas import Alias, AliasHistory, AliasMove
from cairn.storage.errors import AliasNotFoundError, PreconditionFailedError
from cairn.storage.runs.promotion import delete_alias as delete_in_store
from cairn.storage.runs.promotion import promote_step
from cairn.storage.runs.records.aliases import Alias as StoredAlias
from cairn.storage.runs.records.aliases import AliasEvent
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store.clock import from_rfc3339


def list_aliases(plane: ControlPlane, root: str, run: str, *, refresh: bool) -> list[Alias]:
    """Return the aliases of a run, by name.

    Raises:
        RunNotFoundError: There is no such run.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    with run_row(plane, root, run, refresh=refresh) as (connection, row):
        return queries.aliases(connection, row)


def get_alias(plane: ControlPlane, root: str, run: str, alias: str, *, refresh: bool) -> Alias:
    """Return an alias.

    Raises:
        RunNotFoundError, AliasNotFoundError: There is no such run or alias.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    for entry in list_aliases(plane, root, run, refresh=refresh):
        if entry.alias == alias:
            return entry
    if not refresh:
        return get_alias(plane, root, run, alias, refresh=True)
    uri = plane.place(root, run)
    Run(uri).aliases.require(alias)  # raises with the existing names, or the record's damage
    raise AliasNotFoundError(
        "no such alias", path=uri, expected=f"alias {alias!r}", found="one that was set just now"
    )


def promote(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    *,
    alias: str,
    reason: str,
    expect: int | None,
    attempt: int | None = None,
    later: Callable[[Callable[[], None]], object] | None = None,
) -> Alias:
    """Point `alias` at a listed step.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        step: A listed step.
        alias: Name of the alias.
        reason: Reason, which its history keeps.
        expect: Sequence number of the alias as last seen; None: it must not exist.
        attempt: Attempt that must have saved the step; None: any.
        later: Takes a function to call once the answer is on its way; see `promote_step`.

    Raises:
        RunNotFoundError: There is no such run.
        StoreUnavailableError: The store does not answer.
        StepNotFoundError: The step is not listed, or was imported and is gone.
        StepInFlightError: The step is being written.
        StepDamagedError: The step is damaged.
        CorruptionError: The step was imported, and its owner has changed it.
        AliasMovedError: The alias is not as expected.
        GateRefusedError: The step does not pass the alias's gates.
        StepChangedError: The step was deleted during the promotion, or another attempt than
            `attempt` saved it.
        InvalidURIError: `alias` is no valid name.
    """
    stored_run = Run(
        plane.place(root, run)
    )  # not opened: `promote_step` checks the run with the step
    gates = gates_of(plane, root, run, alias)

    def check(info: StepInfo) -> None:
        require_attempt(stored_run, info, attempt)
        require_gates(gates, Candidate(root, stored_run, info, alias, caller.name, reason))

    lost = _refresh_unseen_move(plane, root, run, alias, expect)
    detail = {"alias": alias, "step": step, "reason": reason, "expect": expect}
    with ExitStack() as after:  # runs the callbacks even if the answer is an error
        with audited(plane, caller, "alias.promote", root=root, run=run, **detail) as entry:
            with _alias_moved_error():
                moved = promote_step(
                    stored_run,
                    step,
                    alias,
                    by=caller.name,
                    reason=reason,
                    expect=expect,
                    lost=lost,
                    opened=False,
                    check=None if attempt is None and not gates else check,
                    later=after.callback,
                )
            write = partial(rows.write_alias, root=root, run=run, alias=moved)
            entry.complete(also=write, **_position(moved))
        if later is not None:
            later(after.pop_all().close)
    return _body(moved, audited=True)


def delete_alias(
    plane: ControlPlane, caller: Caller, root: str, run: str, alias: str, *, expect: int
) -> None:
    """Delete an alias; its history stays.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        alias: Name of the alias.
        expect: Sequence number of the alias as last seen.

    Raises:
        RunNotFoundError: There is no such run.
        AliasNotFoundError: There is no such alias.
        AliasMovedError: The alias is not as expected.
    """
    stored_run = plane.run(root, run)
    lost = _refresh_unseen_move(plane, root, run, alias, expect)
    detail = {"alias": alias, "expect": expect}
    with audited(plane, caller, "alias.delete", root=root, run=run, **detail) as entry:
        with _alias_moved_error():
            tombstone = delete_in_store(stored_run, alias, by=caller.name, expect=expect, lost=lost)
        write = partial(rows.write_alias, root=root, run=run, alias=tombstone)
        entry.complete(also=write, **_position(tombstone))


def alias_history(plane: ControlPlane, root: str, run: str, alias: str) -> AliasHistory:
    """Return the moves of an alias from the store, newest first, even after its deletion.

    Raises:
        RunNotFoundError: There is no such run.
        AliasNotFoundError: There never was such an alias.
    """
    events = [
        AliasMove(**event.model_dump(exclude={"at"}), at=from_rfc3339(event.at))
        for event in plane.run(root, run).aliases.history(alias)
    ]
    return AliasHistory(alias=alias, events=events)


def _refresh_unseen_move(
    plane: ControlPlane, root: str, run: str, alias: str, expect: int | None
) -> AliasEvent | None:
    """Refresh the run if the catalog has not seen the alias's last move; return a lost record.

    Call this before a new move, which would hide the last one.

    Returns:
        The last event of the alias that this catalog has seen and the store has lost: the new move
        continues from its sequence number. None: the store has lost nothing.
    """
    with plane.catalog.query() as connection:
        seen, lost = rows.alias_seen(connection, root, run, alias)
    if seen != expect:
        plane.index.refresh_runs({root: plane.root(root)}, [(root, run)])
        with plane.catalog.query() as connection:
            _, lost = rows.alias_seen(connection, root, run, alias)
    return None if lost is None else alias_event(lost)


def _body(alias: StoredAlias, *, audited: bool | None = None) -> Alias:
    return Alias(
        alias=alias.alias,
        step=alias.step,
        attempt=alias.attempt,
        manifest_digest=alias.manifest_digest,
        by=alias.by,
        reason=alias.reason,
        at=from_rfc3339(alias.at),
        sequence=alias.sequence,
        audited=audited,
    )


@contextmanager
def _alias_moved_error() -> Iterator[None]:
    """Convert a lost compare-and-swap to an `AliasMovedError` that has the current alias."""
    try:
        yield
    except PreconditionFailedError as exc:
        current = exc.current if isinstance(exc.current, StoredAlias) else None
        if current is None or current.deleted:
            value, header = None, "create it, send `If-None-Match: *`"
        else:
            value = _body(current).model_dump(mode="json")
            header = f'change it all the same, send `If-Match: "{current.sequence}"`'
        detail = f"{str(exc).removesuffix(exc.next_step)}Nothing was changed. To {header}."
        raise AliasMovedError(detail, extra={"current": value}) from exc


def _position(alias: StoredAlias) -> dict[str, Any]:
    return {
        "step": alias.step,
        "attempt": alias.attempt,
        "manifest_digest": alias.manifest_digest,
        "sequence": alias.sequence,
    }
