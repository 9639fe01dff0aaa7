"""What Prometheus asks for: the metrics of this server.

Who may ask is who may ask for `/healthz`: no key, and nobody on another machine.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from fastapi import APIRouter, FastAPI, Request, Response

from cairn.service.catalog import Index, known_workers, queries
from cairn.service.jobs import Jobs, worker_name
from cairn.service.observing import CONTENT_TYPE, Family, Part, Reading, ServerMetrics
from cairn.service.settings import Settings
from cairn.storage.store import utc_now

router: Final = APIRouter(tags=["health"])

_PER_ROOT: Final = ("root",)
_INDEX: Final = (
    Family(
        "cairn_index_lag_seconds",
        "Since the last look at all of a root began that came to an end.",
        _PER_ROOT,
    ),
    Family("cairn_index_scan_seconds", "How long this server's last look took.", _PER_ROOT),
    Family("cairn_index_problem", "Whether the last look at a root failed.", _PER_ROOT),
    Family("cairn_index_runs", "Runs that the catalog lists.", _PER_ROOT),
    Family("cairn_index_checkpoints", "Checkpoints that the catalog lists.", _PER_ROOT),
)
_JOBS: Final = (Family("cairn_jobs", "Jobs that were ever started.", ("kind", "state")),)
_WORKERS: Final = (Family("cairn_workers", "Workers that were ever started.", ("alive",)),)


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
)
def metrics(request: Request) -> Response:
    """The metrics of this server. No store is asked, and what can't be read is left out."""
    own: ServerMetrics = request.app.state.metrics
    return Response(own.text(), media_type=CONTENT_TYPE)


def parts(app: FastAPI) -> Mapping[str, Part]:
    """What the databases of a server know, once it has opened them."""
    return {
        "index": Part(_INDEX, lambda: _index(app.state.settings, app.state.index)),
        "jobs": Part(_JOBS, lambda: _jobs(app.state.jobs)),
        "workers": Part(_WORKERS, lambda: _workers(app.state.settings, app.state.index)),
    }


def _index(settings: Settings, index: Index) -> Iterator[Reading]:
    with index.catalog.read() as session:
        known = queries.root_sums(session)
    for root, uri in settings.root_uris.items():
        found = known.get(root)
        if found is None or found.uri != str(uri):
            continue  # never looked at: nothing is known of it
        labels = {"root": root}
        if found.scanned is not None:
            lag = max(0.0, (utc_now() - found.scanned).total_seconds())
            yield Reading("cairn_index_lag_seconds", labels, lag)
        if root in index.scan_seconds:
            yield Reading("cairn_index_scan_seconds", labels, index.scan_seconds[root])
        yield Reading("cairn_index_problem", labels, found.problem is not None)
        yield Reading("cairn_index_runs", labels, found.runs)
        yield Reading("cairn_index_checkpoints", labels, found.checkpoints)


def _jobs(jobs: Jobs | None) -> Iterator[Reading]:
    if jobs is None:
        return
    for (kind, state), count in jobs.counts().items():
        yield Reading("cairn_jobs", {"kind": kind, "state": state.value}, count)


def _workers(settings: Settings, index: Index) -> Iterator[Reading]:
    alive = [worker_name(settings, row.name).is_held() for row in known_workers(index.catalog)]
    for held in (True, False):
        yield Reading("cairn_workers", {"alive": str(held).lower()}, alive.count(held))
