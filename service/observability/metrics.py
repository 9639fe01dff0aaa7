"""Prometheus metrics, in a registry of its own for each server and each worker.

Two applications in one process have separate metrics, except those of store requests, which are
counted for the whole process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from cairn.service.observability.scraped_metrics import MetricSource, ScrapedMetrics
from cairn.storage.errors import NotFoundError
from cairn.storage.store.requests import StoreRequest, listen

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_REQUEST_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STORE_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_JOB_SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)


class WorkerMetrics:
    """Metrics of one worker.

    Attributes:
        jobs: Metrics of the jobs that it executes.
    """

    def __init__(self, *, version: str) -> None:
        """Create the metrics, all at 0; `version` is Cairn's."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        what = "Always 1; the version is a label."
        build = Gauge("cairn_build_info", what, ["version"], registry=self.registry)
        build.labels(version).set(1)
        self._store = _StoreMetrics(self.registry)
        self.jobs = JobMetrics(self.registry)

    def text(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    @contextmanager
    def watching(self, parts: Mapping[str, MetricSource] | None = None) -> Iterator[None]:
        """Count requests to stores inside the block, and read `parts` at each scrape.

        Args:
            parts: Metrics that are read from databases, by name of the part; None: there are none.
        """
        end = listen(self._store.count)
        readings = ScrapedMetrics(parts or {})
        self.registry.register(readings)
        try:
            yield
        finally:
            self.registry.unregister(readings)
            end()


class ServerMetrics(WorkerMetrics):
    """Metrics of one server, and of the worker in its process, if there is one.

    Attributes:
        requests: Metrics of the requests to the server.
    """

    def __init__(self, *, version: str) -> None:
        """Create the metrics, all at 0; `version` is Cairn's."""
        super().__init__(version=version)
        self.requests = RequestMetrics(self.registry)


class RequestMetrics:
    """Metrics of the requests to a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "cairn_http_requests",
            "Requests that were answered.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "cairn_http_request_seconds",
            "Until the answer had been sent; of an event stream, until it began.",
            ["method", "route"],
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self.in_progress = Gauge(
            "cairn_http_requests_in_progress",
            "Requests that are being answered.",
            registry=registry,
        )
        self.event_streams = Gauge(
            "cairn_event_streams", "Event streams that are open.", registry=registry
        )
        self._announcements = Counter(
            "cairn_announcements",
            "Saves that jobs have announced.",
            ["root", "outcome"],
            registry=registry,
        )

    def answered(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self._total.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    @contextmanager
    def announcement(self, root: str) -> Iterator[None]:
        """Count an announced save by its outcome: whether the block found the step in the store."""
        outcome = "failed"
        try:
            yield
            outcome = "found"
        except NotFoundError:
            outcome = "not_found"
            raise
        finally:
            self._announcements.labels(root, outcome).inc()


class JobMetrics:
    """Metrics of the jobs that a worker executes."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Create the metrics.

        Args:
            registry: Registry that exports them; None: they are not exported.
        """
        self._seconds = Histogram(
            "cairn_job_seconds",
            "How long a worker was at a job, by how that ended.",
            ["kind", "outcome"],
            buckets=_JOB_SECONDS,
            registry=registry,
        )
        self._running = Gauge(
            "cairn_jobs_running", "Jobs that this worker executes.", ["kind"], registry=registry
        )
        self._bytes = Counter(
            "cairn_job_bytes", "Bytes that jobs have worked through.", ["kind"], registry=registry
        )

    def began(self, kind: str) -> None:
        """Count a job that is executed from now on."""
        self._running.labels(kind).inc()

    def ended(self, kind: str, outcome: str, seconds: float) -> None:
        """Count the end of a job that `began` has counted."""
        self._running.labels(kind).dec()
        self._seconds.labels(kind, outcome).observe(seconds)

    def worked(self, kind: str, nbytes: int) -> None:
        """Count bytes that a job has processed."""
        self._bytes.labels(kind).inc(nbytes)


class _StoreMetrics:
    """Metrics of all requests to stores that this process makes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._total = Counter(
            "cairn_store_requests",
            "Requests to stores, by how they ended: ok, absent, unavailable, error.",
            ["operation", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "cairn_store_request_seconds",
            "Until the store's answer, with all that was tried again.",
            ["operation"],
            buckets=_STORE_SECONDS,
            registry=registry,
        )

    def count(self, call: StoreRequest) -> None:
        self._total.labels(call.operation, call.outcome).inc()
        self._seconds.labels(call.operation).observe(call.seconds)
