"""Actions on workers, the processes that execute jobs."""

from collections.abc import Iterable
from contextlib import suppress

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.operations import get_operation
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.workers import forget_worker, known_workers
from cairn.service.jobs.errors import OperationNotFoundError, WorkerAliveError, WorkerNotFoundError
from cairn.service.jobs.worker_names import worker_name
from cairn.service.schemas import TakenOver, Worker


def list_workers(plane: ControlPlane, caller: Caller) -> list[Worker]:
    """Return all workers, by name, with their current operations in the caller's roots.

    Raises:
        NotReadyError: Jobs were not launched.
    """
    running = plane.jobs.running()
    if caller.roots is not None:
        running = {name: _visible_ids(plane, caller, ids) for name, ids in running.items()}
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


def _visible_ids(plane: ControlPlane, caller: Caller, operations: Iterable[str]) -> list[str]:
    """Return those of some operations' ids that are in the caller's roots."""
    visible = []
    for operation in operations:
        with suppress(OperationNotFoundError):
            visible.append(get_operation(plane, caller, operation).id)
    return visible


def take_over_worker(plane: ControlPlane, caller: Caller, name: str) -> TakenOver:
    """Put the operations of a dead worker back for other workers, whatever their root.

    Raises:
        WorkerNotFoundError: No worker of this name was ever started.
        WorkerAliveError: The worker is alive.
        NotReadyError: Jobs were not launched.
    """
    jobs = plane.jobs
    if name not in [row.name for row in known_workers(plane.catalog)]:
        raise WorkerNotFoundError(f"There is no worker {name!r}. `cairn workers` lists them.")
    with audited(plane, caller, "worker.takeOver", worker=name) as entry:
        if worker_name(plane.settings, name).is_held():
            raise WorkerAliveError(f"Worker {name!r} is alive. End its process first.")
        operations = jobs.put_back(name)
        forget_worker(plane.catalog, name)
        entry.complete(operations=operations)
    return TakenOver(operations=operations)
