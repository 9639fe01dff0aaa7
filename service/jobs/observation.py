"""Observation of a job while a worker executes it: metrics, a span, and ids in log lines."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from cairn.service.jobs.context import JobCancelled, JobInterrupt
from cairn.service.observability.ids import job_of, request_id
from cairn.service.observability.metrics import JobMetrics
from cairn.service.observability.tracing import span, trace_carrier

logger = logging.getLogger(__name__)

REQUEST: Final = "cairn.request_id"
TRACE: Final = "cairn.trace"


def origin() -> dict[str, Any]:
    """Return the ids of the current request, to be stored with the job that it starts."""
    ids: dict[str, Any] = {}
    if (request := request_id()) is not None:
        ids[REQUEST] = request
    if carrier := trace_carrier():
        ids[TRACE] = carrier
    return ids


@contextmanager
def observe_job(
    metrics: JobMetrics, kind: str, operation_id: str, started_by: Mapping[str, Any]
) -> Iterator[None]:
    """Record a job that runs inside the block: metrics, a span, and log lines of its begin and end.

    Args:
        metrics: Metrics of the worker.
        kind: Kind of the job.
        operation_id: Id of the job.
        started_by: Ids of the request that started the job, from `origin` in that request.
    """
    with (
        job_of(operation_id, started_by.get(REQUEST)),
        span(f"job {kind}", kind="consumer", carrier=started_by.get(TRACE, {})) as current_span,
    ):
        current_span.note("cairn.operation_id", operation_id)
        logger.info("job begins", extra={"kind": kind})
        metrics.began(kind)
        began = time.monotonic()
        outcome = "succeeded"
        try:
            yield
        except JobCancelled:
            outcome = "cancelled"
            raise
        except JobInterrupt:  # the job continues later or in another process
            outcome = "interrupted"
            raise
        except BaseException:
            outcome = "failed"
            raise
        finally:
            metrics.ended(kind, outcome, time.monotonic() - began)
            current_span.note("cairn.outcome", outcome)
            current_span.fail(outcome == "failed")
            logger.info("job ends", extra={"kind": kind, "outcome": outcome})


@contextmanager
def observe_part(
    kind: str, operation_id: str, name: str, started_by: Mapping[str, Any]
) -> Iterator[None]:
    """Record a part of a job that runs inside the block, as a span.

    Lines in the log get the ids of the job and of the request that started it.

    Args:
        kind: Kind of the job.
        operation_id: Id of the job.
        name: Name of the part.
        started_by: Ids of the request that started the job, from `origin` in that request.
    """
    with (
        job_of(operation_id, started_by.get(REQUEST)),
        span(f"part of {kind}", kind="consumer", carrier=started_by.get(TRACE, {})) as current_span,
    ):
        current_span.note("cairn.operation_id", operation_id)
        current_span.note("cairn.part", name)
        yield
