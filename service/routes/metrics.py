"""Prometheus metrics of this server.

Without keys, only callers on this machine may read them. With keys, the caller needs a key for all
roots, since the metrics cover all roots; `CAIRN_METRICS_OPEN` opens them to everybody.
"""

from collections.abc import Iterator, Mapping
from typing import Final, cast

from fastapi import APIRouter, FastAPI, Request, Response

from cairn.service.access.callers import Caller, Scope
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.catalog.external_changes import OUTSIDE_KINDS, count_outside
from cairn.service.catalog.workers import known_workers
from cairn.service.events.webhooks import count_dead, waiting_since
from cairn.service.jobs.worker_names import worker_name
from cairn.service.observability.metrics import CONTENT_TYPE, ServerMetrics
from cairn.service.observability.scraped_metrics import Family, MetricSource, Sample
from cairn.storage.store.clock import utc_now

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
    Family(
        "cairn_index_damaged_checkpoints",
        "Those of them whose last verification has failed.",
        _PER_ROOT,
    ),
)
_OUTSIDE: Final = (
    Family(
        "cairn_external_changes_total",
        "Changes of aliases that went around this control plane: `alias.promote`, `alias.delete`.",
        ("root", "kind"),
        counter=True,
    ),
)
_JOBS: Final = (Family("cairn_jobs", "Jobs that were ever started.", ("kind", "state")),)
_WORKERS: Final = (Family("cairn_workers", "Workers that were ever started.", ("alive",)),)
_EVENTS: Final = (
    Family("cairn_webhook_dead", "Events that a webhook did not take and that were given up.", ()),
    Family(
        "cairn_webhook_wait_seconds",
        "How long the oldest event waits that some webhook was not told of; 0: none does.",
        (),
    ),
)


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
    """Get the metrics of this server. No store is read; metrics that can't be read are left out."""
    caller = cast(Caller | None, request.state.caller)
    if caller is not None and not request.app.state.settings.metrics_open:
        caller.require_everywhere(Scope.READ)
    own: ServerMetrics = request.app.state.metrics
    return Response(own.text(), media_type=CONTENT_TYPE)


def parts(app: FastAPI) -> Mapping[str, MetricSource]:
    """Return the metrics that are read from the server's databases, by part.

    Each part looks up `app.state.plane` when it is read, since the server opens it only at start.
    """
    return {
        "index": MetricSource(_INDEX, lambda: _index(app.state.plane)),
        "outside": MetricSource(_OUTSIDE, lambda: _outside(app.state.plane)),
        "jobs": MetricSource(_JOBS, lambda: _jobs(app.state.plane)),
        "workers": MetricSource(_WORKERS, lambda: _workers(app.state.plane)),
        "events": MetricSource(_EVENTS, lambda: _events(app.state.plane)),
    }


def _index(plane: ControlPlane) -> Iterator[Sample]:
    index = plane.index
    with plane.catalog.read() as session:
        sums_by_root = queries.root_sums(session)
    for root, uri in plane.roots.items():
        sums = sums_by_root.get(root)
        if sums is None or sums.uri != str(uri):
            continue  # never indexed, or indexed at another URI: the numbers are not of this root
        labels = {"root": root}
        if (lag := sums.lag(uri)) is not None:
            yield Sample("cairn_index_lag_seconds", labels, lag)
        if root in index.scan_seconds:
            yield Sample("cairn_index_scan_seconds", labels, index.scan_seconds[root])
        yield Sample("cairn_index_problem", labels, sums.problem is not None)
        yield Sample("cairn_index_runs", labels, sums.runs)
        yield Sample("cairn_index_checkpoints", labels, sums.checkpoints)
        yield Sample("cairn_index_damaged_checkpoints", labels, sums.damaged)


def _outside(plane: ControlPlane) -> Iterator[Sample]:
    with plane.catalog.read() as session:
        counted = count_outside(session)
    for root in plane.roots:
        for kind in OUTSIDE_KINDS:
            labels = {"root": root, "kind": kind}
            yield Sample("cairn_external_changes_total", labels, counted.get((root, kind), 0))


def _jobs(plane: ControlPlane) -> Iterator[Sample]:
    if plane.engine is None:
        return
    for (kind, state), count in plane.engine.counts().items():
        yield Sample("cairn_jobs", {"kind": kind, "state": state.value}, count)


def _events(plane: ControlPlane) -> Iterator[Sample]:
    yield Sample("cairn_webhook_dead", {}, count_dead(plane.catalog))
    since = waiting_since(plane.catalog)
    waits = 0.0 if since is None else (utc_now() - since).total_seconds()
    yield Sample("cairn_webhook_wait_seconds", {}, max(0.0, waits))


def _workers(plane: ControlPlane) -> Iterator[Sample]:
    workers = known_workers(plane.catalog)
    alive = [worker_name(plane.settings, row.name).is_held() for row in workers]
    for is_alive in (True, False):
        yield Sample("cairn_workers", {"alive": str(is_alive).lower()}, alive.count(is_alive))
