"""Import of checkpoints that plain Orbax saved."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.access.permission import Operator
from cairn.service.actions import adopt
from cairn.service.dependencies import IdempotencyKey, PlaneDependency, RootName
from cairn.service.http.answers import accepted
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import AdoptRequest, Operation

router: Final = APIRouter(prefix="/roots/{root}", tags=["jobs"], route_class=StoreRoute)


@router.post("/runs:adopt", status_code=202, responses=problem_responses(404, 409))
def adopt_folder(
    caller: Operator,
    root: RootName,
    body: AdoptRequest,
    plane: PlaneDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start an import: list the checkpoints that plain Orbax saved in a folder as steps of a run.

    The folder must be in a root. Each checkpoint is read once, in place, and nothing in the folder
    changes. A repeated import adds new checkpoints. If a checkpoint can't be listed, or has changed
    since it was imported, the operation fails with `urn:cairn:problem:not-all-adopted`, which names
    it; the other checkpoints stay listed.
    """
    started = adopt.adopt_folder(plane, caller, root, body, idempotency_key=idempotency_key)
    return accepted(started, response)
