"""What Prometheus is told: of requests, jobs, stores and the index; and what it is told always."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from cairn import ObjectStore, Settings, StoreUnavailableError, create_app
from cairn.service.observability.metrics import ServerMetrics, WorkerMetrics
from cairn.service.routes import metrics
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import done, save_llama, serving, watch
from tests.service.stores import make_run

STEP = "/v1/roots/default/runs/run/checkpoints/1"


TABLE = re.compile(r"^\| `(cairn_\w+)` \|([^|]*)\| [^|]+ \| (server|worker|both) \|", re.MULTILINE)
HOWTO = Path(__file__).parents[3] / "docs" / "howto" / "observe.md"


def registered(metrics):
    """Every metric of ours: the name of its samples, and its labels."""
    found = {}
    for collector in set(metrics.registry._collector_to_names):
        for family in getattr(collector, "describe", tuple)():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            if name.startswith("cairn_"):
                found[name] = tuple(labels)
    return found


def test_the_table_in_the_documentation_has_every_metric_with_its_labels(app):
    rows = TABLE.findall(HOWTO.read_text(encoding="utf-8"))
    told = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels, _ in rows}
    server, worker = ServerMetrics(version="0"), WorkerMetrics(version="0")
    with server.watching(metrics.parts(app)):
        both = registered(server)
    assert told == both
    assert {name for name, _, of in rows if of != "server"} == set(registered(worker))


def numbers(http):
    """Every sample: by name, by its labels as sorted pairs."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def of(found, name, **labels):
    """One sample; 0 where it is not told."""
    return found.get(name, {}).get(tuple(sorted(labels.items())), 0)


def test_requests_are_counted_by_the_template_of_their_route(http, root):
    make_run(root / "run", [1])
    http.get("/v1/runs")
    http.get("/v1/roots/default/runs/run/checkpoints/1")
    http.get("/v1/roots/default/runs/nothing/checkpoints/1")
    http.post(f"{STEP}:promote", json={"alias": "production"})
    http.get("/static/cairn.css")
    found = numbers(http)
    count = "cairn_http_requests_total"
    step = "/v1/roots/{root}/runs/{run}/checkpoints/{step}"
    assert of(found, count, method="GET", route="/v1/runs", status="200") == 1
    assert of(found, count, method="GET", route=step, status="200") == 1
    assert of(found, count, method="GET", route=step, status="404") == 1
    assert of(found, count, method="POST", route=f"{step}:promote", status="428") == 1
    assert of(found, count, method="GET", route="/static", status="200") == 1
    assert of(found, "cairn_http_request_seconds_count", method="GET", route=step) == 2
    assert of(found, "cairn_http_requests_in_progress") == 1  # this one


def test_paths_and_methods_that_nobody_knows_do_not_fill_the_memory(http):
    for number in range(20):
        http.get(f"/v1/nothing-{number}")
        http.request(f"VERB{number}", "/v1/runs")
    http.get("/v1/runs", headers={"Host": "evil.example"})
    asked = numbers(http)["cairn_http_requests_total"]
    assert len(asked) == 3
    assert {dict(labels)["route"] for labels in asked} == {"(none)", "/v1/runs"}
    assert {dict(labels)["method"] for labels in asked} == {"GET", "OTHER"}


def test_an_error_that_nobody_expected_is_counted_as_500(app):
    def fail():
        raise RuntimeError("boom")

    app.add_api_route("/fail", fail)
    with TestClient(app, base_url=BASE_URL, client=PEER, raise_server_exceptions=False) as http:
        assert http.get("/fail").status_code == 500
        found = numbers(http)
    assert of(found, "cairn_http_requests_total", method="GET", route="/fail", status="500") == 1


def test_two_applications_of_one_process_count_for_themselves(http, settings, tmp_path):
    other = Settings(root=settings.root, data_dir=tmp_path / "other", scan_seconds=0)
    with TestClient(create_app(other, jobs=False), base_url=BASE_URL, client=PEER) as second:
        http.get("/v1/runs")
        route = {"method": "GET", "route": "/v1/runs", "status": "200"}
        assert of(numbers(http), "cairn_http_requests_total", **route) == 1
        assert of(numbers(second), "cairn_http_requests_total", **route) == 0


def test_an_application_that_is_started_again_tells_of_itself_again(app):
    for _ in range(2):
        with TestClient(app, base_url=BASE_URL, client=PEER) as http:
            assert of(numbers(http), "cairn_scrape_problem", part="index") == 0


def test_the_index_tells_what_it_lists_and_how_far_it_is_behind(http, root):
    assert "cairn_index_lag_seconds" not in numbers(http)  # nobody has looked at it
    make_run(root / "a", [1, 2])
    make_run(root / "b", [1])
    http.get("/v1/runs")
    found = numbers(http)
    assert of(found, "cairn_index_runs", root="default") == 2
    assert of(found, "cairn_index_checkpoints", root="default") == 3
    assert of(found, "cairn_index_problem", root="default") == 0
    assert 0 < of(found, "cairn_index_scan_seconds", root="default") < 60
    assert 0 <= of(found, "cairn_index_lag_seconds", root="default") < 60


def test_a_look_that_failed_is_told_and_the_lag_goes_on(app, settings, root, http, monkeypatch):
    make_run(root / "run", [1])
    http.get("/v1/runs")

    def gone(*_args, **_more):
        raise StoreUnavailableError("gone", path="store")

    monkeypatch.setattr("cairn.service.catalog.refresh._list_runs", gone)
    with pytest.raises(StoreUnavailableError):
        app.state.plane.index.scan("default", settings.root_uris["default"])
    found = numbers(http)
    assert of(found, "cairn_index_problem", root="default") == 1
    assert of(found, "cairn_index_lag_seconds", root="default") > 0
    assert of(found, "cairn_index_runs", root="default") == 1


def test_announcements_are_counted_for_roots_that_exist(http, root):
    make_run(root / "run", [1])
    announced = "/v1/roots/{}/runs/{}/checkpoints"
    for where, run in (("default", "run"), ("default", "nothing"), ("nowhere", "run")):
        http.post(announced.format(where, run), json={"step": 1, "attempt": 1})
    found = numbers(http)["cairn_announcements_total"]
    assert found == {
        (("outcome", "found"), ("root", "default")): 1,
        (("outcome", "not_found"), ("root", "default")): 1,
    }


def test_requests_to_the_store_are_counted_and_asking_makes_none(http, root):
    make_run(root / "run", [1])
    before = numbers(http)
    http.get("/v1/runs")
    after, again = numbers(http), numbers(http)
    read = {"operation": "read", "outcome": "ok"}
    name = "cairn_store_requests_total"
    assert of(after, name, **read) > of(before, name, **read)
    for _ in range(20):  # threads of earlier tests may still ask
        if after[name] == again[name]:
            break
        after, again = again, numbers(http)
    assert after[name] == again[name]
    assert of(after, "cairn_store_request_seconds_count", operation="read") > 0


def test_metrics_answer_while_the_store_is_silent(http, root, monkeypatch):
    make_run(root / "run", [1])
    http.get("/v1/runs")
    asked, over = threading.Semaphore(0), threading.Event()

    def hang(*_args, **_more):
        asked.release()
        over.wait(60)
        raise StoreUnavailableError("gone", path="store")

    for name in ("read", "read_each", "parse_many", "list", "children", "folders", "etags"):
        monkeypatch.setattr(ObjectStore, name, hang)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.get, "/v1/runs?refresh=true")
        assert asked.acquire(timeout=30)
        found = numbers(http)
        over.set()
        assert waiting.result().status_code == 503
    assert of(found, "cairn_index_runs", root="default") == 1
    assert set(found["cairn_scrape_problem"].values()) == {0}


def test_a_part_that_fails_or_hangs_is_left_out_and_said(http, root, monkeypatch):
    make_run(root / "run", [1])
    http.get("/v1/runs")
    monkeypatch.setattr("cairn.service.observability.scraped_metrics.ANSWER_SECONDS", 0.1)
    over, asked = threading.Event(), []

    def hang(*_args):
        asked.append(1)
        over.wait(60)
        return iter(())

    monkeypatch.setattr("cairn.service.routes.metrics._index", hang)
    try:
        found, again = numbers(http), numbers(http)
        assert "cairn_index_runs" not in found
        assert of(again, "cairn_scrape_problem", part="index") == 1
        assert of(again, "cairn_scrape_problem", part="workers") == 0
        assert len(asked) == 1  # who hangs is not asked again meanwhile
    finally:
        over.set()


def test_jobs_and_their_worker_are_told(root, tmp_path):
    save_llama(root / "run")
    with serving(root, tmp_path / "data", scan_seconds=0) as http:
        done(http, f"{STEP}:convert", {})
        bad = http.post(f"{STEP}:convert", json={"dtype": "bfloat16"})
        watch(http, bad.json()["id"])
        found = numbers(http)
    assert of(found, "cairn_jobs", kind="convert", state="succeeded") == 2
    assert of(found, "cairn_workers", alive="true") == 1
    assert of(found, "cairn_workers", alive="false") == 0
    assert of(found, "cairn_job_seconds_count", kind="convert", outcome="succeeded") == 2
    assert of(found, "cairn_jobs_running", kind="convert") == 0
    assert of(found, "cairn_job_bytes_total", kind="convert") > 10_000


def test_event_streams_are_counted_while_they_are_open(root, tmp_path):
    save_llama(root / "run")
    with serving(root, tmp_path / "data", scan_seconds=0) as http:
        started = http.post(f"{STEP}:convert", json={}).json()
        watch(http, started["id"])
        found = numbers(http)
    events = "/v1/operations/{operation}/events"
    assert of(found, "cairn_event_streams") == 0
    assert of(found, "cairn_http_request_seconds_count", method="GET", route=events) == 1


@pytest.mark.parametrize("asked", ["/metrics", "/metrics?name[]=x"])
def test_metrics_need_no_more_than_health_does(http, asked):
    assert http.get(asked).status_code == 200
    assert http.get(asked, headers={"Host": "evil.example"}).status_code == 403


def test_readiness_tells_how_far_the_index_is_behind_and_does_not_wait_for_it(root, tmp_path):
    settings = Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0, worker=False)
    with TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as http:
        first = http.get("/readyz")
        assert first.status_code == 200
        assert first.json()["checks"]["index default"] == "not looked at yet"
        http.get("/v1/runs")
        told = http.get("/readyz").json()["checks"]["index default"]
    assert re.fullmatch(r"looked at \d+\.\d s ago", told)
