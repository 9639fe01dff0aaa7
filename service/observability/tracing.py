"""OpenTelemetry spans. They are recorded if the environment names a collector.

The packages come with the extra `otel`, and are imported only then.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from cairn.service.errors import SettingsError
from cairn.storage.store.requests import StoreRequest, listen

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's own variables; each of them turns tracing on."""

FLUSH_SECONDS: Final = 5.0
"""Longest time that the process waits for the collector when it ends, in seconds."""

_tracer: "Tracer | None" = None


class Tracing:
    """Tracer of the process, until it is closed."""

    def __init__(self, provider: "TracerProvider", exporter: "SpanExporter") -> None:
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("cairn")
        self._end_listening = listen(self._tell_store_call)

    def close(self) -> None:
        """Send the remaining spans, and end tracing."""
        global _tracer
        self._end_listening()
        if _tracer is self._tracer:
            _tracer = None
        # The library keeps no deadline of its own here: its exporter asks a collector that is gone
        # again and again, for ten seconds and more.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)
        if ending.is_alive():
            self._exporter.shutdown()

    def _tell_store_call(self, call: StoreRequest) -> None:
        """Record a span of a store request, if it belongs to a traced request or job.

        Background requests, such as the scanner's, have no span.
        """
        from opentelemetry import trace

        if not trace.get_current_span().is_recording():
            return
        ended = time.time_ns()
        span = self._tracer.start_span(
            f"store {call.operation}",
            kind=trace.SpanKind.CLIENT,
            start_time=ended - int(call.seconds * 1e9),
            attributes={"cairn.store.path": call.path, "cairn.store.outcome": call.outcome},
        )
        if call.outcome in ("unavailable", "error"):
            span.set_status(trace.StatusCode.ERROR)
        span.end(ended)


class TracedSpan:
    """Span; its methods do nothing if tracing is off."""

    def __init__(self, span: "Span | None" = None) -> None:
        self._span = span

    def name(self, name: str) -> None:
        """Set the span's name."""
        if self._span is not None:
            self._span.update_name(name)

    def note(self, key: str, value: str | int) -> None:
        """Set an attribute."""
        if self._span is not None:
            self._span.set_attribute(key, value)

    def fail(self, failed: bool) -> None:
        """Set the error status, if `failed`."""
        if failed and self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)


@contextmanager
def traced(service: str, *, version: str) -> Iterator[None]:
    """Trace inside the block, if the environment names a collector.

    Args:
        service: Name of this process at the collector, unless `OTEL_SERVICE_NAME` is set.
        version: Version of Cairn.

    Raises:
        SettingsError: The environment names a collector, but the packages are missing.
    """
    tracing = _start(service, version)
    try:
        yield
    finally:
        if tracing is not None:
            tracing.close()


def _start(service: str, version: str) -> Tracing | None:
    global _tracer
    endpoints = [name for name in ENDPOINTS if os.environ.get(name)]
    if not endpoints or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as exc:
        raise SettingsError(
            f"{endpoints[0]}: expected the extra `otel`, found no module `{exc.name}`. Install it: "
            "pip install 'cairn-checkpoints[otel]', or unset the variable."
        ) from exc
    named = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(
        resource=Resource.create({"service.name": named, "service.version": version}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing = Tracing(provider, exporter)
    _tracer = tracing._tracer
    return tracing


@contextmanager
def span(
    name: str,
    *,
    kind: Literal["server", "consumer", "internal"] = "internal",
    carrier: Mapping[str, str] | None = None,
) -> Iterator[TracedSpan]:
    """Record the block as a span; an error that leaves the block marks the span as failed.

    Args:
        name: Name of the span.
        kind: OpenTelemetry's kind of span.
        carrier: Headers, or a similar mapping. Their `traceparent` names the parent; without it the
            span has no parent. None: the current span is the parent.
    """
    tracer = _tracer
    if tracer is None:
        yield TracedSpan()
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = None if carrier is None else TraceContextTextMapPropagator().extract(dict(carrier))
    # Error texts may have secrets, and nothing redacts spans; so errors are not recorded.
    with tracer.start_as_current_span(
        name,
        context=parent,
        kind=trace.SpanKind[kind.upper()],
        record_exception=False,
        set_status_on_exception=False,
    ) as otel_span:
        traced_span = TracedSpan(otel_span)
        try:
            yield traced_span
        except Exception:
            traced_span.fail(True)
            raise


def trace_carrier() -> dict[str, str]:
    """Return the current span as `{"traceparent": …}`; {}: tracing is off."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, Any] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
