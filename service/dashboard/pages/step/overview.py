"""What a step is, how to use it, and what can be done to it: `/ui/{root}/{run}/steps/{step}`."""

from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Caller, Reader
from cairn.service.actions import ControlPlane
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName, StepNumber
from cairn.service.errors import NotReadyError
from cairn.service.schemas import CheckpointState, Operation

LOOKED_THROUGH: Final = 200
"""Operations, newest first, among which those of a step are looked for."""
SHOWN: Final = 8

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=CatalogPage
)


@router.get("/ui/{root}/{run}/steps/{step}")
def step_page(
    request: Request,
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
) -> HTMLResponse:
    """One step: its metrics, how to load it, its exports, and what can be done to it."""
    found = actions.get_checkpoint(plane, root, run, step, refresh=False)
    aliases = actions.list_aliases(plane, root, run, refresh=False)
    later = [one for one in aliases if one.step > step]
    return page(
        request,
        "step/overview.html",
        checkpoint=found,
        listed=found.state is CheckpointState.LISTED,
        aliases=aliases,
        stranded=later,
        run=actions.get_run(plane, root, run, refresh=False),
        uri=f"{plane.place(root, run)}/steps/{step}",
        operations=operations_of(plane, caller, root, run, step),
    )


def operations_of(
    plane: ControlPlane, caller: Caller, root: str, run: str, step: int
) -> list[Operation]:
    """The newest operations of a step; none where jobs were not launched."""
    try:
        recent, _ = actions.list_operations(
            plane, caller, after=None, limit=LOOKED_THROUGH, state=None
        )
    except NotReadyError:
        return []
    place = {"root": root, "run": run, "step": step}
    return [one for one in recent if place.items() <= one.request.items()][:SHOWN]
