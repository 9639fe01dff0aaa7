"""Cleaning up a run: what a retention policy does not keep, and garbage."""

from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from cairn.service.actions import judge, plan_body, stored_policy
from cairn.service.catalog import note_deletion
from cairn.service.dependencies import CatalogDependency, IdempotencyKey, RootName, RunDependency
from cairn.service.http import ActorDependency, StoreRoute, problem_responses
from cairn.service.jobs import JobsDependency, accepted, gc, get_jobs, retention
from cairn.service.schemas import (
    ApplyRetentionRequest,
    CollectGarbageRequest,
    Operation,
    RetentionPlan,
)
from cairn.storage.runs import check_names
from cairn.storage.store import utc_now

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
    root: RootName,
    run: RunDependency,
    body: ApplyRetentionRequest,
    actor: ActorDependency,
    catalog: CatalogDependency,
    http: Request,
    idempotency_key: IdempotencyKey = None,
) -> RetentionPlan | Response:
    """Say what a policy keeps and deletes, or with `dry_run: false` start to delete.

    Refused, with the nearest name known, if no step carries a metric or a label that it names.
    The operation judges anew; its result names the steps that it deleted, and those that were
    promoted in between and stay. Each can be undeleted until the grace time is over. Cancelling
    ends it; what was deleted until then stays so.
    """
    if body.dry_run:
        return plan_body(root, run, judge(run, body.policy, now=utc_now()))
    check_names(run, stored_policy(body.policy))  # refused now rather than by the job
    request = retention.retention_request(
        root=root, run=run, policy=body.policy, grace=body.grace_seconds, by=actor
    )
    operation = get_jobs(http).start(retention.KIND, request, idempotency_key=idempotency_key)
    detail = {
        "policy": request["policy"],
        "grace_seconds": body.grace_seconds,
        "operation": operation.id,
    }
    note_deletion(catalog, "run.retention", root=root, run=run, actor=actor, detail=detail)
    response = JSONResponse(operation.model_dump(mode="json"), status_code=202)
    accepted(operation, response)
    return response


@router.post("/{run}:gc", status_code=202, responses=problem_responses(404))
def collect_run_garbage(
    root: RootName,
    run: RunDependency,
    body: CollectGarbageRequest,
    actor: ActorDependency,
    catalog: CatalogDependency,
    jobs: JobsDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Find what the run needs no more, and with `dry_run: false` remove it for good.

    That is deleted steps whose grace time is over, halves of steps whose writer is gone, and
    exports of steps that are gone; a job may go on writing the run. The result counts it, and has
    its first thousand `entries`.
    """
    request = gc.gc_request(root=root, run=run, dry_run=body.dry_run)
    operation = jobs.start(gc.KIND, request, idempotency_key=idempotency_key)
    if not body.dry_run:
        detail = {"operation": operation.id}
        note_deletion(catalog, "run.gc", root=root, run=run, actor=actor, detail=detail)
    return accepted(operation, response)
