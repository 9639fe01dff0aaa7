"""The retention job: deletes the steps that a policy does not keep. Each can be undeleted."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from cairn.service.deletion import read_deletions
from cairn.service.jobs.context import JobContext, JobKind, Request, Result
from cairn.service.jobs.runs import open_run
from cairn.service.retention_plan import judge, policy_text
from cairn.service.schemas import RetentionPolicy
from cairn.storage.errors import StepInUseError
from cairn.storage.runs import TRASH, Run, StepInfo, delete_step, parse_trash_file
from cairn.storage.store import StoreURI, utc_now

KIND: Final = "retention"
STEPS_AT_ONCE: Final = 8


def retention_request(
    *, root: str, run: Run, policy: RetentionPolicy, grace: float, by: str
) -> dict[str, Any]:
    """The JSON that a job is started with."""
    return {
        "root": root,
        "run": run.uri.name,
        "policy": policy.model_dump(mode="json"),
        "grace_seconds": grace,
        "by": by,
    }


def _run(context: JobContext, request: Request) -> Result:
    return context.step("delete", lambda: _delete(context, request))


def _delete(context: JobContext, request: Request) -> Result:
    """Judge and delete; a step that is taken up again judges anew, and goes on where it was."""
    run = open_run(context.roots, request)
    reason = f"{_mark(context)}{policy_text(request['policy'])}"
    judged = judge(run, RetentionPolicy.model_validate(request["policy"]), now=utc_now())
    going = [info for info, decision in judged if not decision.keep]
    context.progress.set(
        done_bytes=0,
        total_bytes=sum(info.nbytes or 0 for info in going),
        message=f"deleting {len(going)} steps",
    )

    def delete(info: StepInfo) -> StepInUseError | None:
        try:
            delete_step(run, info, by=request["by"], reason=reason, grace=request["grace_seconds"])
        except StepInUseError as exc:  # promoted since it was judged
            return exc
        return None

    refused = []
    with ThreadPoolExecutor(STEPS_AT_ONCE) as pool:
        for batch in _batches(going):
            context.check()
            for info, refusal in zip(batch, pool.map(delete, batch), strict=True):
                if refusal is not None:
                    refused.append({**_key(info.step, info.attempt), "detail": str(refusal)})
                context.progress.advance(info.nbytes or 0)
    context.progress.set(message="done")
    return {
        "root": request["root"],
        "run": request["run"],
        "kept": len(judged) - len(going),
        "deleted": _deleted_by(run, _mark(context)),
        "refused": refused,
    }


def _deleted_by(run: Run, mark: str) -> list[dict[str, int]]:
    """Steps that this operation deleted; read off the store, however often it was taken up."""
    keys = [key for name in run.objects.list(TRASH) if (key := parse_trash_file(name)) is not None]
    return [
        _key(*key)
        for key, tombstone in sorted(read_deletions(run, keys).items())
        if tombstone.reason.startswith(mark)
    ]


def _mark(context: JobContext) -> str:
    """How the reason of a deletion begins that this operation made."""
    return f"retention {context.operation_id}: "


def _key(step: int, attempt: int) -> dict[str, int]:
    return {"step": step, "attempt": attempt}


def _batches(steps: Sequence[StepInfo]) -> Iterator[Sequence[StepInfo]]:
    for start in range(0, len(steps), STEPS_AT_ONCE):
        yield steps[start : start + STEPS_AT_ONCE]


def _abandon(roots: Mapping[str, StoreURI], request: Request, operation_id: str) -> None:
    """Nothing: what was deleted until then stays deleted, and can be undeleted."""


RETENTION: Final = JobKind(KIND, _run, _abandon)
