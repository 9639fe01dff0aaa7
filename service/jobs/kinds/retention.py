"""Retention job: deletes the steps that a policy does not keep. Each can be undeleted."""

from collections.abc import Sequence
from typing import Any, Final

from cairn.service.catalog.step_records import read_deletions
from cairn.service.jobs.context import JobContext, JobKind, Request, Result, open_run
from cairn.service.jobs.policies import policy_text, stored_policy
from cairn.service.schemas import RetentionPolicy
from cairn.storage.runs.retention import apply_retention
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo

KIND: Final = "retention"


def retention_request(
    *, root: str, run: Run, policy: RetentionPolicy, grace: float, by: str
) -> dict[str, Any]:
    """Return the request of a retention job, as JSON."""
    return {
        "root": root,
        "run": run.uri.name,
        "policy": policy.model_dump(mode="json"),
        "grace_seconds": grace,
        "by": by,
    }


def _delete(context: JobContext, request: Request) -> Result:
    """Decide which steps a policy deletes, delete them, and return the result.

    A resumed job decides anew; steps that were deleted before stay deleted.
    """
    run = open_run(context.roots, request)
    policy = stored_policy(RetentionPolicy.model_validate(request["policy"]))
    done_bytes = 0

    def advanced(done: Sequence[StepInfo], total_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += sum(info.nbytes or 0 for info in done)
        total = max(total_bytes, done_bytes)
        context.progress.set(done_bytes=done_bytes, total_bytes=total, message="deleting steps")
        context.check()

    outcome = apply_retention(
        run,
        policy,
        by=request["by"],
        reason=f"{_mark(context)}{policy_text(request['policy'])}",
        grace=request["grace_seconds"],
        progress=advanced,
    )
    if outcome.errors:
        raise outcome.errors[0]
    context.progress.set(message="done")
    # From the store, so that the deletions of earlier executions of this operation are included.
    tombstones = sorted(read_deletions(run, run.trashed()).items())
    mark = _mark(context)
    return {
        "root": request["root"],
        "run": request["run"],
        "kept": sum(decision.keep for decision in outcome.decisions),
        "deleted": [
            _key(*key) for key, tombstone in tombstones if tombstone.reason.startswith(mark)
        ],
        "refused": [{**_key(*key), "detail": why} for key, why in sorted(outcome.in_use.items())],
    }


def _mark(context: JobContext) -> str:
    """Return the text with which the reason of each deletion by this operation begins."""
    return f"retention {context.operation_id}: "


def _key(step: int, attempt: int) -> dict[str, int]:
    return {"step": step, "attempt": attempt}


# Without `abandon`: deleted steps stay deleted, and can be undeleted.
RETENTION: Final = JobKind(
    KIND,
    run=lambda context, request: context.step("delete", lambda: _delete(context, request)),
    changed=lambda request: str(request["run"]),
)
