"""Gathering of a checkpoint into one safetensors file."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.access.permission import Operator
from cairn.service.actions import gather as gather_actions
from cairn.service.dependencies import (
    IdempotencyKey,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.http.answers import accepted
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.problems import problem_responses
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
    started = gather_actions.gather_checkpoint(
        plane, caller, root, run, step, body, idempotency_key=idempotency_key
    )
    return accepted(started, response)
