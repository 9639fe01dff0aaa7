"""Garbage collection job: finds files that a run no longer needs, and removes them on request."""

from typing import Any, Final

from cairn.service.jobs.context import JobContext, JobKind, Request, Result, open_run
from cairn.storage.runs.gc import Garbage, collect_garbage, find_garbage
from cairn.storage.runs.run import Run

KIND: Final = "gc"
ENTRIES_KEPT: Final = 1000


def gc_request(*, root: str, run: Run, dry_run: bool) -> dict[str, Any]:
    """Return the request of a garbage collection job, as JSON."""
    return {"root": root, "run": run.uri.name, "dry_run": dry_run}


def _collect(context: JobContext, request: Request) -> Result:
    run = open_run(context.roots, request)

    def removed(garbage: Garbage) -> None:
        context.progress.advance(garbage.nbytes)
        context.check()

    context.progress.set(done_bytes=0)
    if request["dry_run"]:
        context.progress.set(message="looking for garbage")
        garbage_found = find_garbage(run)
    else:
        context.progress.set(message="removing garbage")
        writer = f"cairn-gc/{context.operation_id}"
        garbage_found = collect_garbage(run, by=writer, progress=removed)
    nbytes = sum(garbage.nbytes for garbage in garbage_found)
    context.progress.set(done_bytes=nbytes, total_bytes=nbytes, message="done")
    return {
        "root": request["root"],
        "run": request["run"],
        "dry_run": request["dry_run"],
        "count": len(garbage_found),
        "bytes": nbytes,
        "entries": [
            {
                "kind": garbage.kind.value,
                "name": garbage.name,
                "bytes": garbage.nbytes,
                "reason": garbage.reason,
                "step": garbage.step,
                "attempt": garbage.attempt,
            }
            for garbage in garbage_found[:ENTRIES_KEPT]
        ],
    }


# Without `abandon`: removed garbage is gone, and the next run finds the rest.
GC: Final = JobKind(
    KIND,
    run=lambda context, request: context.step("collect", lambda: _collect(context, request)),
    changed=lambda request: str(request["run"]),
)
