"""Export of a checkpoint as Hugging Face files or as one GGUF file."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.access.permission import Operator
from cairn.service.actions import convert as convert_actions
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
from cairn.service.schemas import ConvertRequest, Operation

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["jobs"], route_class=StoreRoute
)


@router.post("/{step}:convert", status_code=202, responses=problem_responses(404, 409))
def convert_checkpoint(
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    body: ConvertRequest,
    plane: PlaneDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start an export. The result of the operation names the artifact.

    An export of a damaged step is refused with 409, `step-damaged`, unless `despite_damage` gives a
    reason. A repeated request returns the same operation and the same artifact, even after the
    operation succeeded, for as long as the artifact's files exist. A request with an idempotency
    key starts an operation of its own.
    """
    started = convert_actions.convert_checkpoint(
        plane, caller, root, run, step, body, idempotency_key=idempotency_key
    )
    return accepted(started, response)
