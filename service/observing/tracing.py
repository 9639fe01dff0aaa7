"""Spans for OpenTelemetry: on where the environment names a collector, else nothing at all.

The packages come with the extra `otel`; nothing here imports them unless it is on.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

from cairn.service.errors import SettingsError
from cairn.storage.store import StoreCall, listen

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables of OpenTelemetry's own; one of them turns tracing on."""

FLUSH_SECONDS: Final = 5.0
"""How long the end of a process waits for a collector."""

_tracer: "Tracer | None" = None


class Tracing:
    """What sends spans, until it is closed."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("cairn")
        self._end_listening = listen(self._tell_store_call)

    def close(self) -> None:
        """Send what is left, and make no more."""
        global _tracer
        self._end_listening()
        if _tracer is self._tracer:
            _tracer = None
        self._provider.force_flush(int(FLUSH_SECONDS * 1000))
        self._provider.shutdown()

    def _tell_store_call(self, call: StoreCall) -> None:
        """A span of a request or a job; what nobody asked for, such as the scanner's, has none."""
        from opentelemetry import trace

        if not trace.get_current_span().is_recording():
            return
        ended = time.time_ns()
        made = self._tracer.start_span(
            f"store {call.operation}",
            kind=trace.SpanKind.CLIENT,
            start_time=ended - int(call.seconds * 1e9),
            attributes={"cairn.store.path": call.path, "cairn.store.outcome": call.outcome},
        )
        if call.outcome in ("unavailable", "error"):
            made.set_status(trace.StatusCode.ERROR)
        made.end(ended)


class TracedPart:
    """A span, or nothing where tracing is off."""

    def __init__(self, span: "Span | None" = None) -> None:
        self._span = span

    def name(self, name: str) -> None:
        """Call it that."""
        if self._span is not None:
            self._span.update_name(name)

    def note(self, key: str, value: str | int) -> None:
        """Add an attribute."""
        if self._span is not None:
            self._span.set_attribute(key, value)

    def fail(self, failed: bool) -> None:
        """Mark it, if it failed."""
        if failed and self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)


@contextmanager
def traced(service: str, *, version: str) -> Iterator[None]:
    """Meanwhile spans are made and sent, if the environment says where to.

    Args:
        service: Name of this process to the collector, unless `OTEL_SERVICE_NAME` has one.
        version: Of Cairn.

    Raises:
        SettingsError: The environment asks for it, and its packages are missing.
    """
    tracing = _start(service, version)
    try:
        yield
    finally:
        if tracing is not None:
            tracing.close()


def _start(service: str, version: str) -> Tracing | None:
    global _tracer
    asked = [name for name in ENDPOINTS if os.environ.get(name)]
    if not asked or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as exc:
        raise SettingsError(
            f"{asked[0]}: expected the extra `otel`, found no module `{exc.name}`. Install it: pip "
            "install 'cairn-checkpoints[otel]', or unset the variable."
        ) from exc
    named = os.environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(
        resource=Resource.create({"service.name": named, "service.version": version}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracing = Tracing(provider)
    _tracer = tracing._tracer
    return tracing


@contextmanager
def span(
    name: str,
    *,
    kind: Literal["server", "consumer", "internal"] = "internal",
    carrier: Mapping[str, str] | None = None,
) -> Iterator[TracedPart]:
    """What is done inside is one span, below the one around it; it failed if an error leaves it.

    Args:
        name: Of the span.
        kind: OpenTelemetry's word.
        carrier: Headers or the like that may have a `traceparent`, which it is below then.
    """
    tracer = _tracer
    if tracer is None:
        yield TracedPart()
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = None if carrier is None else TraceContextTextMapPropagator().extract(dict(carrier))
    # Texts of errors may hold what a log must not; here nothing would look for it.
    with tracer.start_as_current_span(
        name,
        context=parent,
        kind=trace.SpanKind[kind.upper()],
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        told = TracedPart(made)
        try:
            yield told
        except Exception:
            told.fail(True)
            raise


def trace_carrier() -> dict[str, str]:
    """What hands the span around this on to who goes on with it: `traceparent`, or nothing."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, Any] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
