"""Restore job: a new run from a step (fork), or a run that goes back to a step (rollback)."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from cairn.service.jobs.context import (
    JobContext,
    JobKind,
    Request,
    Result,
    open_run,
    step_request,
)
from cairn.storage.runs.fork import abandon_fork, fork_run
from cairn.storage.runs.rollback import roll_back
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.store.disk.confinement import safe_join
from cairn.storage.store.uri import StoreURI

KIND: Final = "restore"
FORK: Final = "fork"
ROLLBACK: Final = "rollback"
_BY: Final = "cairn-restore"


def restore_request(
    *,
    root: str,
    run: Run,
    step: StepInfo,
    mode: str,
    target: str | None,
    strand: Iterable[str] = (),
    despite_damage: str | None = None,
) -> dict[str, Any]:
    """Return the request of a restore job, as JSON.

    Args:
        root: Name of the run's root.
        run: Run of the step.
        step: Step to restore.
        mode: `FORK` or `ROLLBACK`.
        target: Name of the new run; None for a rollback.
        strand: Aliases that may stay on superseded steps.
        despite_damage: See `step_request`.
    """
    return {
        **step_request(root, run, step, despite_damage=despite_damage),
        "mode": mode,
        "target": target,
        "strand": sorted({*strand}),
    }


def writer_id(operation_id: str) -> str:
    """Return the writer id with which an operation writes the run."""
    return f"{_BY}/{operation_id}"


def _run(context: JobContext, request: Request) -> Result:
    body = _rollback if request["mode"] == ROLLBACK else _fork
    return context.step(request["mode"], lambda: body(context, request))


def _fork(context: JobContext, request: Request) -> Result:
    source, step = _source(context.roots, request)
    target = safe_join(context.roots[request["root"]], request["target"])
    progress = context.progress
    progress.set(message=f"copying step {step.step} to {request['target']}")

    def copied(done: int, total: int) -> None:
        context.check()
        progress.set(done_bytes=done, total_bytes=total)

    forked = fork_run(
        source,
        step,
        target,
        by=writer_id(context.operation_id),
        progress=copied,
        despite_damage=request.get("despite_damage"),
    )
    progress.set(message="done")
    result = {
        "root": request["root"],
        "run": request["target"],
        "step": forked.step,
        "attempt": forked.attempt,
        "bytes": forked.nbytes,
    }
    if forked.copied is not None:
        result |= {
            "checked": forked.copied.how,
            "checked_files": forked.copied.files,
            "checked_bytes": forked.copied.nbytes,
        }
    return result


def _rollback(context: JobContext, request: Request) -> Result:
    run, step = _source(context.roots, request)
    context.progress.set(message=f"setting back to step {step.step}")
    done = roll_back(
        run,
        step,
        by=_BY,
        request=context.operation_id,
        strand=request["strand"],
        despite_damage=request.get("despite_damage"),
    )
    context.progress.set(message="done")
    return {
        "root": request["root"],
        "run": request["run"],
        "step": done.step,
        "attempt": done.attempt,
        "superseded": list(done.superseded),
        "aliases_superseded": list(done.aliases),
    }


def _source(roots: Mapping[str, StoreURI], request: Request) -> tuple[Run, StepInfo]:
    run = open_run(roots, request)
    step = StepInfo(
        request["step"],
        request["attempt"],
        StepState.LISTED,
        manifest_digest=request["manifest_digest"],
    )
    return run, step


def _abandon(roots: Mapping[str, StoreURI], request: Request, operation_id: str) -> None:
    if request["mode"] == FORK:
        target = safe_join(roots[request["root"]], request["target"])
        abandon_fork(target, by=writer_id(operation_id))


RESTORE: Final = JobKind(
    KIND,
    _run,
    _abandon,
    changed=lambda request: str(request["target" if request["mode"] == FORK else "run"]),
)
