"""Listing what plain Orbax has saved."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service import actions
from cairn.service.access import Operator
from cairn.service.dependencies import IdempotencyKey, PlaneDependency, RootName
from cairn.service.http import StoreRoute, problem_responses
from cairn.service.routes.jobs.accepted import accepted
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
    """Start to list the checkpoints that plain Orbax has saved in a folder as the steps of a run.

    Each is read once, where it lies, and nothing in the folder is changed. The folder has to be in
    a root. The same again adds what is new; what is not listed, or not as it was adopted, has the
    operation fail with `urn:cairn:problem:not-all-adopted`, which names it, and the rest stays.
    """
    started = actions.adopt_folder(plane, caller, root, body, idempotency_key=idempotency_key)
    return accepted(started, response)
