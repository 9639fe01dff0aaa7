"""Gathering of a checkpoint into one safetensors file."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service import actions
from cairn.service.access import Operator
from cairn.service.dependencies import (
    IdempotencyKey,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.http import StoreRoute, problem_responses
from cairn.service.routes.jobs.accepted import accepted
from cairn.service.schemas import GatherRequest, Operation

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["jobs"], route_class=StoreRoute
)


@router.post("/{step}:gather", status_code=202, responses=problem_responses(404, 409))
def gather_checkpoint(
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    body: GatherRequest,
    plane: PlaneDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start gathering items of a checkpoint into one safetensors file.

    The result of the operation names the artifact. A damaged step is refused with 409,
    `step-damaged`, unless `despite_damage` gives a reason.
    """
    started = actions.gather_checkpoint(
        plane, caller, root, run, step, body, idempotency_key=idempotency_key
    )
    return accepted(started, response)
