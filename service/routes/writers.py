"""Writer of a run: get it, and take the run over from it."""

from typing import Final

from fastapi import APIRouter

from cairn.service.access.permission import Administrator, Reader
from cairn.service.actions import writers
from cairn.service.dependencies import PlaneDependency, RootName, RunName
from cairn.service.http.limited_routes import StoreReadRoute, StoreRoute
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import RunTakenOver, RunWriter, TakeOverRequest

router: Final = APIRouter(prefix="/roots/{root}/runs", tags=["runs"], route_class=StoreRoute)


def get_run_writer(
    caller: Reader, root: RootName, run: RunName, plane: PlaneDependency
) -> RunWriter:
    """Get the current or last writer of a run, read from the store now."""
    return writers.get_writer(plane, root, run)


router.add_api_route(
    "/{run}/writer",
    get_run_writer,
    responses=problem_responses(404),
    route_class_override=StoreReadRoute,
)


@router.post("/{run}:takeOver", responses=problem_responses(404, 409, 412))
def take_over_run(
    caller: Administrator,
    root: RootName,
    run: RunName,
    body: TakeOverRequest,
    plane: PlaneDependency,
) -> RunTakenOver:
    """End the attempt of the writer that holds the run, so that another writer can begin at once.

    Listed steps stay. A job that still runs under the old writer can no longer list a step: its
    next save fails, and so does a save that is under way. A takeover is not needed for a job that
    is started again under its writer's id, since that job takes the run over by itself. Nor is it
    needed once the lease has expired, 75 seconds after its last renewal.
    """
    return writers.take_over_run(plane, caller, root, run, body)
