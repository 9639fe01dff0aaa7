"""Who writes a run, and taking it from them."""

from typing import Final

from fastapi import APIRouter

from cairn.service import actions
from cairn.service.access import Administrator, Reader
from cairn.service.dependencies import PlaneDependency, RootName, RunName
from cairn.service.http import StoreReadRoute, StoreRoute, problem_responses
from cairn.service.schemas import RunTakenOver, RunWriter, TakeOverRequest

router: Final = APIRouter(prefix="/roots/{root}/runs", tags=["runs"], route_class=StoreRoute)


def get_run_writer(
    caller: Reader, root: RootName, run: RunName, plane: PlaneDependency
) -> RunWriter:
    """Who writes the run, or did last; the store is asked now."""
    return actions.get_writer(plane, root, run)


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
    """End the attempt of the writer that holds the run, so that another writer begins at once.

    Listed steps stay. A job that still runs under that writer can list no step any more: its next
    save fails, and so does one that is under way. Not needed for a job that is started again under
    its writer's id, which takes the run over by itself; nor once the lease has ended, 75 seconds
    after it was last renewed.
    """
    return actions.take_run_over(plane, caller, root, run, body)
