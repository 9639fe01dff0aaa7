"""The processes that execute jobs."""

from typing import Annotated, Final

from fastapi import APIRouter, Path

from cairn.service.catalog import forget_worker, known_workers
from cairn.service.dependencies import CatalogDependency, SettingsDependency
from cairn.service.http import problem_responses
from cairn.service.jobs import JobsDependency, WorkerAliveError, WorkerNotFoundError, worker_name
from cairn.service.schemas import TakenOver, Worker, WorkerList

router: Final = APIRouter(prefix="/workers", tags=["jobs"])

WorkerNamed = Annotated[str, Path(max_length=128, description="Name of a worker.")]


@router.get("")
def list_workers(
    catalog: CatalogDependency, jobs: JobsDependency, settings: SettingsDependency
) -> WorkerList:
    """Every worker that was started, by name, and what it executes."""
    running = jobs.running()
    return WorkerList(
        workers=[
            Worker(
                name=row.name,
                host=row.host,
                process=row.process,
                version=row.version,
                started=row.started,
                alive=worker_name(settings, row.name).is_held(),
                running=running.get(row.name, []),
            )
            for row in known_workers(catalog)
        ]
    )


@router.post("/{worker}:takeOver", responses=problem_responses(404, 409))
def take_over_worker(
    worker: WorkerNamed,
    catalog: CatalogDependency,
    jobs: JobsDependency,
    settings: SettingsDependency,
) -> TakenOver:
    """Have other workers go on with what a dead one has left.

    Needed only if it will not be started again under its name: then it goes on by itself.
    """
    if worker not in [row.name for row in known_workers(catalog)]:
        raise WorkerNotFoundError(f"worker {worker!r}: expected one that was started, found none")
    if worker_name(settings, worker).is_held():
        raise WorkerAliveError(
            f"worker {worker!r}: expected a dead one, found it alive. End its process first."
        )
    operations = jobs.put_back(worker)
    forget_worker(catalog, worker)
    return TakenOver(operations=operations)
