"""The verify job: is a step, or every listed step of a run, still what was saved? No JAX."""

import functools
from collections.abc import Mapping
from typing import Any, Final

from cairn.service.jobs.context import JobContext, JobKind, Request, Result, open_run, step_request
from cairn.service.jobs.errors import DamagedError
from cairn.storage.errors import StepNotFoundError
from cairn.storage.reading import VerifyReport, verify_step
from cairn.storage.runs import Run, StepInfo, StepState
from cairn.storage.store import StoreURI

KIND: Final = "verify"
PROBLEMS_KEPT: Final = 100


def verify_request(*, root: str, run: Run, step: StepInfo | None) -> dict[str, Any]:
    """The JSON that a job is started with; without a step it is about all that are listed."""
    if step is None:
        return {"root": root, "run": run.uri.name}
    return step_request(root, run, step)


def _run(context: JobContext, request: Request) -> Result:
    if "step" in request:
        wanted = [[request["step"], request["attempt"]]]
    else:
        wanted = context.step("list", lambda: _listed(context, request))["steps"]
    reports = []
    for number, (step, attempt) in enumerate(wanted, 1):
        place = f" ({number} of {len(wanted)})" if len(wanted) > 1 else ""
        info = _info(request, step, attempt)
        verify = functools.partial(_verify, context, request, info, place)
        found = context.step(f"verify {step}.{attempt}", verify)
        reports += found["reports"]
    return context.step("report", lambda: _result(request, reports))


def _listed(context: JobContext, request: Request) -> Result:
    """Every listed step, by names alone: one whose manifest can't be read is among them."""
    held = open_run(context.roots, request).step_attempts()
    return {"steps": sorted(map(list, held.items()))}


def _info(request: Request, step: int, attempt: int) -> StepInfo:
    digest = request.get("manifest_digest")
    return StepInfo(step, attempt, StepState.LISTED, manifest_digest=digest)


def _verify(context: JobContext, request: Request, info: StepInfo, place: str) -> Result:
    run = open_run(context.roots, request)
    progress = context.progress
    progress.set(done_bytes=0, total_bytes=None, message=f"verifying step {info.step}{place}")

    def read(done: int, total: int) -> None:
        context.check()
        progress.set(done_bytes=done, total_bytes=total)

    try:
        return {"reports": [_report(verify_step(run, info, progress=read))]}
    except StepNotFoundError:
        if "step" in request:
            raise
        return {"reports": []}  # deleted since it was listed


def _report(report: VerifyReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "attempt": report.attempt,
        "sound": report.ok,
        "files": report.files,
        "bytes": report.nbytes,
        "leaves": report.leaves,
        "seconds": round(report.seconds, 3),
        "problem_count": len(report.problems),
        "problems": list(report.problems[:PROBLEMS_KEPT]),
        "extra_files": list(report.extra[:PROBLEMS_KEPT]),
    }


def _result(request: Request, reports: list[dict[str, Any]]) -> Result:
    """What was found, if all is well.

    Raises:
        DamagedError: Something is not; it carries what was found.
    """
    result = {"root": request["root"], "run": request["run"], "steps": reports}
    damaged = [report for report in reports if not report["sound"]]
    if not damaged:
        return result
    problems = [
        f"{request['run']}/steps/{report['step']}: {problem}"
        for report in damaged
        for problem in report["problems"]
    ]
    count = sum(report["problem_count"] for report in damaged)
    raise DamagedError(
        f"{len(damaged)} of {len(reports)} steps: expected what was saved, found {count} problems: "
        f"{'; '.join(problems[:3])}{'; …' if count > 3 else ''}. Restore the files from a backup, "
        "or use another step.",
        extra={**result, "problems": problems[:PROBLEMS_KEPT]},
    )


def _abandon(roots: Mapping[str, StoreURI], request: Request, operation_id: str) -> None:
    """Nothing: it writes nothing."""


VERIFY: Final = JobKind(KIND, _run, _abandon)
