"""Workers: the processes that execute jobs."""

from typing import Annotated, Final

from fastapi import APIRouter, Path

from cairn.service.access.permission import Reader, ServerAdministrator
from cairn.service.actions import workers
from cairn.service.dependencies import PlaneDependency
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import TakenOver, WorkerList

router: Final = APIRouter(prefix="/workers", tags=["jobs"], route_class=PermittedRoute)

WorkerNamed = Annotated[str, Path(max_length=128, description="Name of a worker.")]


@router.get("")
def list_workers(caller: Reader, plane: PlaneDependency) -> WorkerList:
    """List the workers by name, each with the jobs that it executes in the caller's roots."""
    return WorkerList(workers=workers.list_workers(plane, caller))


@router.post("/{worker}:takeOver", responses=problem_responses(404, 409))
def take_over_worker(
    caller: ServerAdministrator, worker: WorkerNamed, plane: PlaneDependency
) -> TakenOver:
    """Hand the unfinished jobs of a dead worker over to other workers.

    This is needed only if the worker will not be started again under its name. A worker that is
    started again under its name continues its jobs by itself.
    """
    return workers.take_over_worker(plane, caller, worker)
