"""A worker tells of itself over HTTP, where a setting says."""

import json
import signal
import socket

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from cairn import Settings, create_app
from cairn.service.errors import ServeError
from cairn.service.observability.metrics import WorkerMetrics
from cairn.service.observability.worker_port import WorkerPort
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import done, save_llama
from tests.service.test_workers import started, working


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def names(text):
    return {family.name for family in text_string_to_metric_families(text)}


def test_a_worker_beside_the_server_tells_of_its_jobs_and_ends_while_it_is_asked(root, tmp_path):
    save_llama(root / "llama")
    data = tmp_path / "data"
    data.mkdir()
    settings = Settings(root=str(root), data_dir=data, scan_seconds=0, worker=False)
    port = free_port()
    with (
        working(settings, "one", CAIRN_WORKER_PORT=str(port)) as process,
        TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as http,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as worker,
    ):
        started(process)
        assert worker.get("/healthz").json()["status"] == "ok"
        done(http, "/v1/roots/default/runs/llama/checkpoints/1:convert", {})
        text = worker.get("/metrics").text
        assert 'cairn_job_seconds_count{kind="convert",outcome="succeeded"} 1.0' in text
        assert 'cairn_store_requests_total{operation="write",outcome="ok"}' in text
        assert "cairn_http_requests" not in text
        assert worker.get("/v1/runs").status_code == 404
        with socket.create_connection(("127.0.0.1", port)):  # says nothing
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_the_port_is_on_the_host_of_the_settings(host):
    port = WorkerPort(host, 0, WorkerMetrics(version="1.2.3"), version="1.2.3")
    try:
        shown = f"[{host.strip('[]')}]" if ":" in host else host
        answer = httpx.get(f"http://{shown}:{port.port}/healthz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "version": "1.2.3"})
        answer = httpx.get(f"http://{shown}:{port.port}/metrics")
        assert "cairn_build_info" in names(answer.text)
    finally:
        port.close()


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"CAIRN_WORKER_PORT: .*127\.0\.0\.1:{port}"):
            WorkerPort("127.0.0.1", port, WorkerMetrics(version="0"), version="0")


def test_a_taken_port_ends_a_worker_with_one_line(root, tmp_path):
    settings = Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0)
    settings.prepare()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        working(settings, "one", CAIRN_WORKER_PORT=str(taken.getsockname()[1])) as process,
    ):
        assert process.wait(60) == 1
        text = process.stderr.read()
        assert text.splitlines()[-1].startswith("cairn: CAIRN_WORKER_PORT: expected a free address")
        assert "Traceback" not in text


def test_the_answer_of_health_is_json_whatever_the_version_is():
    port = WorkerPort("127.0.0.1", 0, WorkerMetrics(version='1"'), version='1"')
    try:
        assert (
            json.loads(httpx.get(f"http://127.0.0.1:{port.port}/healthz").text)["version"] == '1"'
        )
    finally:
        port.close()
