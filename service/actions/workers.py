"""The processes that execute jobs."""

from cairn.service.access import Caller
from cairn.service.actions.auditing import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import forget_worker, known_workers
from cairn.service.jobs import WorkerAliveError, WorkerNotFoundError, worker_name
from cairn.service.schemas import TakenOver, Worker


def list_workers(plane: ControlPlane) -> list[Worker]:
    """Every worker that was started, by name, and what it executes.

    Raises:
        NotReadyError: Jobs were not launched.
    """
    running = plane.jobs.running()
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
