"""Cleaning up a run: retention policies and garbage collection."""

from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from cairn.service.access.permission import Operator
from cairn.service.actions import clean_up
from cairn.service.dependencies import IdempotencyKey, PlaneDependency, RootName, RunName
from cairn.service.http.answers import accepted
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import (
    ApplyRetentionRequest,
    CollectGarbageRequest,
    Operation,
    RetentionPlan,
)

router: Final = APIRouter(prefix="/roots/{root}/runs", tags=["jobs"], route_class=StoreRoute)


@router.post(
    "/{run}:applyRetention",
    response_model=RetentionPlan,
    responses={
        200: {"description": "`dry_run`: what the policy keeps and deletes now."},
        202: {"description": "Not `dry_run`: the operation that deletes.", "model": Operation},
        **problem_responses(404),
    },
)
def apply_retention(
    caller: Operator,
    root: RootName,
    run: RunName,
    body: ApplyRetentionRequest,
    plane: PlaneDependency,
    idempotency_key: IdempotencyKey = None,
) -> RetentionPlan | Response:
    """Plan which steps a policy keeps and deletes, or with `dry_run: false` start to delete them.

    If no step has a metric or a label that the policy names, the request is refused, with the
    nearest known name. The operation evaluates the policy again. Its result names the steps that it
    deleted, and those that stay because they were promoted in between. Deleted steps can be
    undeleted until the grace time is over. Cancelling ends the operation but undeletes nothing.
    """
    if body.dry_run:
        return clean_up.plan_retention(plane, root, run, body.policy)
    operation = clean_up.apply_retention(
        plane, caller, root, run, body, idempotency_key=idempotency_key
    )
    response = JSONResponse(operation.model_dump(mode="json"), status_code=202)
    accepted(operation, response)
    return response


@router.post("/{run}:gc", status_code=202, responses=problem_responses(404))
def collect_run_garbage(
    caller: Operator,
    root: RootName,
    run: RunName,
    body: CollectGarbageRequest,
    plane: PlaneDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start to find the garbage of a run, and with `dry_run: false` to remove it for good.

    Garbage is deleted steps whose grace time is over, unfinished steps whose writer is gone, and
    exports of steps that are gone. A job may keep writing the run meanwhile. The result has the
    counts and the first thousand `entries`.
    """
    started = clean_up.collect_garbage(
        plane, caller, root, run, dry_run=body.dry_run, idempotency_key=idempotency_key
    )
    return accepted(started, response)
