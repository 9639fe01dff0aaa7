"""The processes that execute jobs."""

from collections.abc import Iterable
from contextlib import suppress

from cairn.service.access import Caller
from cairn.service.actions.auditing import audited
from cairn.service.actions.operations import get_operation
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import forget_worker, known_workers
from cairn.service.jobs import (
    OperationNotFoundError,
    WorkerAliveError,
    WorkerNotFoundError,
    worker_name,
)
from cairn.service.schemas import TakenOver, Worker


def list_workers(plane: ControlPlane, caller: Caller) -> list[Worker]:
    """Every worker that was started, by name, and what it executes in roots of the caller.

    Raises:
        NotReadyError: Jobs were not launched.
    """
    running = plane.jobs.running()
    if caller.roots is not None:
        running = {name: _visible(plane, caller, ids) for name, ids in running.items()}
    return [
        Worker(
            name=row.name,
            host=row.host,
            process=row.process,
            version=row.version,
            started=row.started,
            alive=worker_name(plane.settings, row.name).is_held(),
            running=running.get(row.name, []),
        )
        for row in known_workers(plane.catalog)
    ]


def _visible(plane: ControlPlane, caller: Caller, operations: Iterable[str]) -> list[str]:
    """Ids of those that are of roots that a caller may use."""
    found = []
    for operation in operations:
        with suppress(OperationNotFoundError):
            found.append(get_operation(plane, caller, operation).id)
    return found


def take_over_worker(plane: ControlPlane, caller: Caller, name: str) -> TakenOver:
    """Have other workers go on with what a dead one has left, whatever root that is of.

    Raises:
        WorkerNotFoundError: No worker of that name was started.
        WorkerAliveError: It lives.
        NotReadyError: Jobs were not launched.
    """
    jobs = plane.jobs
    if name not in [row.name for row in known_workers(plane.catalog)]:
        raise WorkerNotFoundError(f"worker {name!r}: expected one that was started, found none")
    with audited(plane, caller, "worker.takeOver", worker=name) as entry:
        if worker_name(plane.settings, name).is_held():
            raise WorkerAliveError(
                f"worker {name!r}: expected a dead one, found it alive. End its process first."
            )
        operations = jobs.put_back(name)
        forget_worker(plane.catalog, name)
        entry.complete(operations=operations)
    return TakenOver(operations=operations)
