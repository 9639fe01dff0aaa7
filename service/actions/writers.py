"""Writer of a run, and its takeover."""

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.runs import get_run
from cairn.service.schemas import RunTakenOver, RunWriter, TakeOverRequest
from cairn.storage.runs.lease import read_lease
from cairn.storage.runs.rollback import take_over
from cairn.storage.store.clock import from_rfc3339, utc_now


def get_writer(plane: ControlPlane, root: str, run: str) -> RunWriter:
    """Return the writer of a run, from its lease in the store.

    Raises:
        UnknownRootError, RunNotFoundError: There is no such run.
        CorruptionError, UnsupportedFormatError: The lease is unreadable.
        StoreUnavailableError: The store does not answer.
    """
    lease = read_lease(plane.run(root, run).objects)
    if lease is None:
        return RunWriter(writer=None, attempt=None, expires=None, holds=False)
    return RunWriter(
        writer=lease.writer,
        attempt=lease.attempt,
        expires=from_rfc3339(lease.expires),
        holds=lease.is_alive(utc_now()),
    )


def take_over_run(
    plane: ControlPlane, caller: Caller, root: str, run: str, body: TakeOverRequest
) -> RunTakenOver:
    """End the attempt of a run's writer, so that another may begin at once.

    Raises:
        UnknownRootError, RunNotFoundError: There is no such run.
        PreconditionFailedError: The lease has changed since the caller saw it.
        LeaseHeldError: Another attempt took the lease just now.
        CorruptionError, UnsupportedFormatError, StoreCheckError, StoreUnavailableError: The store
            does not allow it.
    """
    stored_run = plane.run(root, run)
    with audited(
        plane,
        caller,
        "run.takeOver",
        root=root,
        run=run,
        attempt=body.attempt,
        reason=body.reason,
    ) as entry:
        done = take_over(stored_run, body.attempt, by=caller.name)
        entry.complete(writer=done.writer, latest_step=done.latest_step)
    get_run(plane, root, run, refresh=True)
    return RunTakenOver(
        writer=done.writer, ended=done.ended, attempt=done.attempt, latest_step=done.latest_step
    )
