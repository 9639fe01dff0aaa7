"""Spans reach a collector: of requests, jobs with their steps, and what those ask of a store."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from cairn import Settings, create_app
from cairn.service.observability.tracing import span, trace_carrier, traced
from tests.packaging.refusing import run, without
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import save_llama, serving, watch
from tests.service.stores import make_run
from tests.service.test_workers import started, working

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
STEP = "/v1/roots/default/runs/run/checkpoints/1"


# The framework brings OpenTelemetry's interface, and the extra what sends spans.
MISSING = (
    "import sys\nfor name in ('sdk', 'exporter'): sys.modules[f'opentelemetry.{name}'] = None\n"
)


class Collector:
    """What was sent to it."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

    def spans(self, service: str | None = None) -> list[Span]:
        return [
            one
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for one in scope.spans
            if service is None or attributes(resource.resource)["service.name"] == service
        ]


def attributes(told) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in told.attributes}


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", collector
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


@pytest.fixture(autouse=True)
def _untraced(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector(monkeypatch):
    with collecting() as (url, found):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield found


def named(spans, name):
    return [one for one in spans if one.name == name]


def test_a_request_is_a_span_below_its_callers_with_what_it_asked_of_the_store(
    collector, settings, root
):
    make_run(root / "run", [1])
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
        http.get("/v1/roots/default/runs/run?refresh=true", headers=TRACEPARENT)
        http.get("/v1/roots/default/runs/nothing?refresh=true")
    found = collector.spans("cairn-server")
    first, second = named(found, "GET /v1/roots/{root}/runs/{run}")
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert first.kind == Span.SPAN_KIND_SERVER
    told = attributes(first)
    assert (told["http.request.method"], told["http.response.status_code"]) == ("GET", 200)
    assert len(told["cairn.request_id"]) == 32
    assert second.trace_id.hex() != TRACE
    below = [one for one in found if one.parent_span_id == first.span_id]
    assert {"store read", "store list"} & {one.name for one in below}
    assert {one.trace_id.hex() for one in below} == {TRACE}
    assert all(attributes(one)["cairn.store.path"] for one in below)
    for one in below:
        assert first.start_time_unix_nano <= one.start_time_unix_nano + 1_000_000
        assert one.end_time_unix_nano <= first.end_time_unix_nano


def test_an_unexpected_error_is_a_failed_span_without_its_text(collector, settings):
    def fail():
        raise RuntimeError("hunter2")

    app = create_app(settings, jobs=False)
    app.add_api_route("/fail", fail)
    with TestClient(app, base_url=BASE_URL, client=PEER, raise_server_exceptions=False) as http:
        http.get("/fail")
    (one,) = named(collector.spans(), "GET /fail")
    assert one.status.code == Status.STATUS_CODE_ERROR
    assert attributes(one)["http.response.status_code"] == 500
    assert "hunter2" not in str(one)


def test_a_job_goes_on_with_the_trace_of_its_request_and_has_its_steps(collector, root, tmp_path):
    save_llama(root / "run")
    with serving(root, tmp_path / "data", scan_seconds=0) as http:
        asked = http.post(f"{STEP}:convert", json={}, headers=TRACEPARENT).json()
        watch(http, asked["id"])
    found = collector.spans()
    (request,) = named(found, "POST /v1/roots/{root}/runs/{run}/checkpoints/{step}:convert")
    (job,) = named(found, "job convert")
    assert (job.trace_id.hex(), job.parent_span_id) == (TRACE, request.span_id)
    assert attributes(job)["cairn.operation_id"] == asked["id"]
    assert attributes(job)["cairn.outcome"] == "succeeded"
    steps = [one for one in found if one.name.startswith("step ")]
    assert steps
    assert {one.parent_span_id for one in steps} == {job.span_id}
    stored = [one for one in found if one.name == "store write"]
    assert {one.parent_span_id for one in stored} & {one.span_id for one in steps}


def test_a_worker_beside_the_server_goes_on_with_the_trace(collector, root, tmp_path):
    save_llama(root / "run")
    (tmp_path / "data").mkdir()
    settings = Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0, worker=False)
    with (
        working(settings, "one") as process,
        TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as http,
    ):
        started(process)
        asked = http.post(f"{STEP}:convert", json={}, headers=TRACEPARENT).json()
        watch(http, asked["id"])
    (job,) = named(collector.spans("cairn-worker"), "job convert")
    assert job.trace_id.hex() == TRACE


def test_the_looks_of_the_scanner_have_no_spans(collector, settings, root):
    make_run(root / "run", [1])
    app = create_app(settings, jobs=False)
    with TestClient(app, base_url=BASE_URL, client=PEER):
        app.state.plane.index.scan("default", settings.root_uris["default"])
    assert collector.spans() == []


def test_a_collector_that_does_not_answer_delays_no_request_and_no_end(settings, monkeypatch):
    """It has been sent spans, and they are still under way when the server has ended."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    monkeypatch.setattr("cairn.service.observability.tracing.FLUSH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
            assert http.get("/healthz").status_code == 200
            connection, _ = silent.accept()
            assert http.get("/healthz").status_code == 200
    connection.setblocking(False)
    with connection, pytest.raises(BlockingIOError):  # else there is an end, and `all` has it
        all(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("variables", [{}, {"OTEL_SDK_DISABLED": "true"}])
def test_without_a_collector_nothing_is_made(variables, monkeypatch):
    if variables:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with traced("x", version="0"), span("x") as told:
        told.name("y")
        told.note("a", 1)
        told.fail(True)
        assert trace_carrier() == {}


NAMES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
STARTED_WITH_EACH = f"""
import os
from cairn.service.command.cli import main
for name in {NAMES}:
    os.environ[name] = "http://127.0.0.1:1"
    try:
        main()
    except SystemExit as ending:
        print(ending.code)
    del os.environ[name]
"""


def test_a_collector_without_the_extra_ends_the_start_and_says_what_to_install(tmp_path, root):
    done = run(
        without([], MISSING + STARTED_WITH_EACH),
        *("serve", "--root", str(root), "--port", "0"),
        CAIRN_DATA_DIR=str(tmp_path),
    )
    assert (done.returncode, done.stdout) == (0, "1\n1\n"), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("cairn: ")]
    for name, line in zip(NAMES, lines, strict=True):
        assert line.startswith(f"cairn: {name}: expected the extra `otel`, found no module")
        assert "pip install 'cairn-checkpoints[otel]'" in line
    assert "Traceback" not in done.stderr


def test_spans_are_not_made_once_their_application_has_ended(collector, settings):
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER):
        pass
    with span("late"):
        assert trace_carrier() == {}
    assert collector.spans() == []


def test_a_span_that_an_error_leaves_has_failed_and_does_not_say_why(collector):
    with traced("x", version="0"), pytest.raises(ValueError, match="hunter2"), span("step"):
        raise ValueError("hunter2")
    (one,) = collector.spans("x")
    assert one.status.code == Status.STATUS_CODE_ERROR
    assert "hunter2" not in str(one)
