"""Verify job: compares a step, or the listed steps of a run, with what was saved."""

import functools
import logging
from typing import Any, Final

from cairn.counts import count_text
from cairn.service.jobs.context import JobContext, JobKind, Request, Result, open_run, step_request
from cairn.service.jobs.errors import DamagedError
from cairn.storage.errors import StepNotFoundError, StorageError
from cairn.storage.reading.verify import VerifyReport, verify_step
from cairn.storage.runs.run import Run
from cairn.storage.runs.run_check import check_run
from cairn.storage.runs.step_states import StepInfo, StepState

logger = logging.getLogger(__name__)

KIND: Final = "verify"
PROBLEMS_KEPT: Final = 100


def verify_request(
    *, root: str, run: Run, step: StepInfo | None, steps: str = "all"
) -> dict[str, Any]:
    """Return the request of a verify job, as JSON.

    Args:
        root: Name of the run's root.
        run: The run.
        step: Step to verify; None: verify the run's records, and the steps that `steps` names.
        steps: Listed steps to verify: "all", "latest" or "none".
    """
    if step is None:
        return {"root": root, "run": run.uri.name, "steps": steps}
    return step_request(root, run, step)


def _run(context: JobContext, request: Request) -> Result:
    records = None
    if "steps" in request:  # a whole run: verify its records too
        records = context.step("records", lambda: _records(context, request))
    if "step" in request:
        steps = [[request["step"], request["attempt"]]]
    else:
        steps = context.step("list", lambda: _listed(context, request))["steps"]
    reports: list[dict[str, Any]] = []
    for number, (step, attempt) in enumerate(steps, 1):
        place = f" ({number} of {len(steps)})" if len(steps) > 1 else ""
        digest = request.get("manifest_digest")
        info = StepInfo(step, attempt, StepState.LISTED, manifest_digest=digest)
        read, ahead = sum(report["bytes"] for report in reports), len(steps) - number
        verify = functools.partial(_verify, context, request, info, place, read, ahead)
        verified = context.step(f"verify {step}.{attempt}", verify)
        reports += verified["reports"]
    return context.step("report", lambda: _result(request, records, reports))


def _records(context: JobContext, request: Request) -> Result:
    context.progress.set(done_bytes=0, total_bytes=None, message="verifying the records")
    report = check_run(open_run(context.roots, request))
    return {
        "sound": report.ok,
        "count": report.records,
        "problem_count": len(report.problems),
        "problems": list(report.problems[:PROBLEMS_KEPT]),
        "unlisted": list(report.unlisted[:PROBLEMS_KEPT]),
    }


def _listed(context: JobContext, request: Request) -> Result:
    """Return the listed steps by their names alone, even those whose manifests are unreadable."""
    listed = sorted(open_run(context.roots, request).step_attempts().items())
    chosen = {"none": listed[:0], "latest": listed[-1:]}.get(request.get("steps", "all"), listed)
    return {"steps": list(map(list, chosen))}


def _verify(
    context: JobContext, request: Request, info: StepInfo, place: str, before: int, ahead: int
) -> Result:
    """Verify a step, and return its report; no report if the step was deleted meanwhile.

    Args:
        context: Context of the job.
        request: Request of the job.
        info: Step to verify.
        place: Position among the steps, as text.
        before: Bytes of the steps before it.
        ahead: Number of steps after it; the progress assumes that each is as large as this one.
    """
    run = open_run(context.roots, request)
    progress = context.progress
    progress.set(done_bytes=before, message=f"verifying step {info.step}{place}")

    def read(done: int, total: int) -> None:
        context.check()
        progress.set(done_bytes=before + done, total_bytes=before + total * (1 + ahead))

    try:
        report = verify_step(run, info, progress=read)
    except StepNotFoundError:
        if "step" in request:
            raise
        return {"reports": []}  # deleted after it was listed
    noted = _note(run, info, report, job=context.operation_id)
    return {"reports": [{**_report(report), "noted": noted}]}


def _note(run: Run, info: StepInfo, report: VerifyReport, *, job: str) -> bool:
    """Record the verification with the step; return whether the record shows its result.

    A failure is only logged: the result is valid without the record.
    """
    try:
        noted = report.note(run, by=KIND, job=job)
    except StorageError as exc:
        logger.warning("%s: verified, and that could not be noted: %s", run.step_uri(info), exc)
        return False
    return report.ok is (noted.damaged is None)


def _report(report: VerifyReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "attempt": report.attempt,
        "sound": report.ok,
        "loads": report.loads,
        "files": report.files,
        "bytes": report.nbytes,
        "leaves": report.leaves,
        "seconds": round(report.seconds, 3),
        "problem_count": len(report.problems),
        "problems": list(report.problems[:PROBLEMS_KEPT]),
        "extra_files": list(report.extra[:PROBLEMS_KEPT]),
        "shared_with": sorted(step for step, _ in report.shared),
    }


def _result(request: Request, records: Result | None, reports: list[dict[str, Any]]) -> Result:
    """Return the result of the job, if nothing is damaged.

    Raises:
        DamagedError: Something is damaged; the error has the result.
    """
    result = {"root": request["root"], "run": request["run"], "steps": reports}
    problems, amiss = [], 0
    if records is not None:
        result["records"] = records
        problems = [f"{request['run']}: {problem}" for problem in records["problems"]]
        amiss = records["problem_count"]
    damaged = [report for report in reports if not report["sound"]]
    if not damaged and not amiss:
        return result
    problems += [
        f"{request['run']}/steps/{report['step']}: {problem}"
        for report in damaged
        for problem in report["problems"]
    ]
    count = sum(report["problem_count"] for report in damaged) + amiss
    what = f"{len(damaged)} of {count_text(len(reports), 'step')}" + " and the run's records" * (
        amiss > 0
    )
    raise DamagedError(
        f"{what}: expected what was saved, found {count_text(count, 'problem')}: "
        f"{'; '.join(problems[:3]).rstrip('.')}{'; …' if count > 3 else ''}. Restore the files "
        "from a backup and verify again, or use another step; for records see what `cairn repair` "
        "can do.",
        extra={**result, "problems": problems[:PROBLEMS_KEPT]},
    )


# Without `abandon`: recorded results stay.
VERIFY: Final = JobKind(KIND, _run, changed=lambda request: str(request["run"]))
