"""The catalog as an index: what it answers alone, when it is behind, and when the store is gone."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient

from cairn import (
    ObjectStore,
    Run,
    Settings,
    StoreUnavailableError,
    create_app,
    parse_uri,
    promote_step,
)
from cairn.service.catalog import rows
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.refresh import Index
from cairn.service.catalog.scanner import Scanner
from cairn.storage.store.clock import utc_now
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import refresh, scanner
from tests.service.stores import annotate, begin_saving, make_run, publish, trash

RUN = "/v1/roots/default/runs/run"
SECONDS = 30.0


BOTH = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def database_url(request, tmp_path):
    """Of an empty database; tests of what depends on its kind ask for both."""
    if getattr(request, "param", "sqlite") == "postgresql":
        return request.getfixturevalue("postgresql").create()
    return f"sqlite:///{tmp_path}/catalog.sqlite"


@pytest.fixture
def settings(root, tmp_path, database_url):
    data = tmp_path / "data"
    return Settings(root=str(root), data_dir=data, database_url=database_url, scan_seconds=0)


@pytest.fixture
def index(settings):
    settings.prepare()
    catalog = Catalog.open(settings.database_url)
    yield Index(catalog)
    catalog.close()


def latest(index, name="run", root="default"):
    with index.catalog.read() as session:
        row = rows.find_run(session, root, name)
    return None if row is None else row.latest_step


def wait_for(condition):
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


@BOTH
def test_what_is_known_is_read_without_the_store(http, root, monkeypatch):
    run = make_run(root / "run", [1, 2, 3])
    annotate(run, 3, labels={"eval": "passed"})
    assert http.delete(f"{RUN}/checkpoints/1").is_success
    begin_saving(run, 4)
    headers = {"If-None-Match": "*"}
    http.post(f"{RUN}/checkpoints/2:promote", json={"alias": "best"}, headers=headers)
    assert http.get("/v1/runs").is_success  # the first looks at every run
    paths = (
        "/v1/runs",
        "/v1/roots/default/runs",
        RUN,
        f"{RUN}/checkpoints",
        f"{RUN}/checkpoints?state=all",
        *(f"{RUN}/checkpoints/{step}" for step in (1, 2, 3, 4)),
        f"{RUN}/aliases",
        f"{RUN}/aliases/best",
    )
    before = [http.get(f"{path}{'&' if '?' in path else '?'}refresh=true") for path in paths]

    def refusing(call):
        def asked(*arguments, **options):
            # A writer of another test of this process may still look after its lease.
            assert threading.current_thread().name == "cairn-lease", "the store was asked"
            return call(*arguments, **options)

        return asked

    for name in ("read", "read_each", "parse_many", "list", "children", "folders", "etags"):
        monkeypatch.setattr(ObjectStore, name, refusing(getattr(ObjectStore, name)))
    for path, answer in zip(paths, before, strict=True):
        again = http.get(path)
        assert (again.status_code, again.json()) == (200, answer.json())
    states = {one["step"]: one["state"] for one in before[4].json()["checkpoints"]}
    assert states == {4: "in_flight", 3: "listed", 2: "listed", 1: "trashed"}
    assert before[4].json()["checkpoints"][3]["deletion"]["by"] == "loopback"


def test_what_the_catalog_does_not_know_is_looked_for(http, root):
    assert http.get("/v1/runs").json()["runs"] == []
    make_run(root / "run", [1])
    assert http.get(f"{RUN}/checkpoints/1").json()["state"] == "listed"
    publish(Run.open(root / "run"), 1, 2)
    assert http.get(f"{RUN}/checkpoints/2").json()["state"] == "listed"
    assert [one["step"] for one in http.get(f"{RUN}/checkpoints").json()["checkpoints"]] == [2, 1]


@BOTH
def test_runs_that_are_none_leave_nothing_behind(http, app, root):
    """A caller chooses the name: kept for each that is asked for, they would fill the memory."""
    make_run(root / "run", [1])
    for number in range(5):
        assert http.get(f"{RUN}-{number}").status_code == 404
        assert http.get(f"{RUN}-{number}", params={"refresh": True}).status_code == 404
    assert http.get(RUN, params={"refresh": True}).is_success
    assert not app.state.plane.index._turns


def test_a_scan_finds_what_nobody_announced(index, root):
    uri = parse_uri(root)
    run = make_run(root / "run", [1])
    index.scan("default", uri)
    assert latest(index) == 1
    publish(run, 1, 2)
    make_run(root / "new", [5])
    index.scan("default", uri)
    assert (latest(index), latest(index, "new")) == (2, 5)
    shutil.rmtree(root / "new")
    index.scan("default", uri)
    assert (latest(index), latest(index, "new")) == (2, None)


def test_a_look_that_a_clock_ahead_has_noted_keeps_no_other_server_from_looking(index, root):
    uri = parse_uri(str(root))
    ahead = utc_now() + timedelta(hours=1)
    with index.catalog.write() as session:
        rows.write_root(session, "default", uri, scanned=ahead, problem=None)
    make_run(root / "run", [1])
    index.scan_in_turn("default", uri, 5.0)
    assert latest(index) == 1
    with index.catalog.read() as session:
        assert rows.find_root(session, "default").scanned < ahead
    make_run(root / "other", [2])
    index.scan_in_turn("default", uri, 60.0)
    assert latest(index, "other") is None  # it was somebody's turn just now


def test_the_scanner_looks_again_and_again_until_it_is_closed(index, root, monkeypatch):
    monkeypatch.setattr("cairn.service.catalog.scanner.REST", 1)
    scanner = Scanner(index, {"default": parse_uri(root)}, 0.01)
    scanner.start()
    run = make_run(root / "run", [1])
    wait_for(lambda: latest(index) == 1)
    publish(run, 1, 2)
    wait_for(lambda: latest(index) == 2)
    scanner.close()
    publish(run, 1, 3)
    assert latest(index) == 2


@pytest.mark.parametrize(
    ("uri", "took", "worked", "rest"),
    [
        ("/store", 0.02, 0.02, 4.0),
        ("/store", 0.3, 0.02, 4.0),  # a busy machine makes no list old
        ("/store", 3.0, 0.02, 30.0),
        ("/store", 0.02, 0.5, 4.0),  # others of the process worked too
        ("gs://bucket/store", 3.0, 0.02, 600.0),
    ],
)
def test_looks_at_a_disk_are_as_far_apart_as_they_work(uri, took, worked, rest):
    assert scanner.rest_after(parse_uri(uri), took, worked) == pytest.approx(rest)


def test_a_scan_that_fails_is_told_and_tried_again(index, root, monkeypatch, caplog):
    monkeypatch.setattr("cairn.service.catalog.scanner.REST", 1)
    scanner = Scanner(index, {"default": parse_uri(root)}, 0.01)
    refresh, failed = index.refresh_root, threading.Event()

    def failing(*args, **more):
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        return refresh(*args, **more)

    monkeypatch.setattr(index, "refresh_root", failing)
    make_run(root / "run", [1])
    scanner.start()
    wait_for(lambda: latest(index) == 1)
    scanner.close()
    assert "root default was not looked at" in caplog.text


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_a_root_that_is_gone_empties_no_list(http, root, left):
    make_run(root / "run", [1])
    before = http.get("/v1/runs").json()
    assert len(before["runs"]) == 1
    root.rename(root.parent / "moved")
    if left == "an empty folder":  # what is mounted there is not
        root.mkdir()
    answer = http.get("/v1/runs", params={"refresh": True})
    assert answer.status_code == 503
    assert "expected 1 run: run" in answer.json()["detail"]
    assert http.get("/v1/runs").json() == before
    assert http.get(f"{RUN}/checkpoints").json()["checkpoints"][0]["step"] == 1


def test_a_run_that_can_no_longer_be_read_stays_as_it_was_and_is_named(index, root):
    make_run(root / "run", [1])
    index.scan("default", parse_uri(root))
    (root / "run/run.json").write_text("{half")
    index.scan("default", parse_uri(root))
    with index.catalog.read() as session:
        row = rows.find_run(session, "default", "run")
    assert row.latest_step == 1
    assert "run/run.json" in row.problems[0]


@BOTH
def test_labels_and_deletions_that_changed_are_read_again_and_others_are_not(
    index, root, monkeypatch
):
    run = make_run(root / "run", range(1, 6))
    for step in range(1, 6):
        annotate(run, step, labels={"eval": "running"})
    later = time.time_ns() + 60_000_000_000
    monkeypatch.setattr("cairn.storage.store.files_local.time.time_ns", lambda: later)
    monkeypatch.setattr("cairn.service.catalog.change_tokens.time.time_ns", lambda: later)
    index.refresh_run("default", run)
    annotate(run, 3, labels={"eval": "passed"})
    trash(run, 5)
    read = []
    parse_many = ObjectStore.parse_many

    def counted(self, keys, parse):
        keys = list(keys)
        read.extend(keys)
        return parse_many(self, keys, parse)

    monkeypatch.setattr(ObjectStore, "parse_many", counted)
    index.refresh_run("default", run)
    assert [one for one in read if one.startswith("annotations/")] == ["annotations/3.1.json"]
    assert "trash/5.1.json" in read
    read.clear()
    index.refresh_run("default", run)
    assert read == []


def test_a_step_counts_as_abandoned_once_its_writer_is_not_heard_of(http, root, monkeypatch):
    run = make_run(root / "run", [1])
    begin_saving(run, 2)
    path = f"{RUN}/checkpoints/2"
    assert http.get(path).json()["state"] == "in_flight"
    with http.app.state.plane.index.catalog.read() as session:
        due = rows.find_run(session, "default", "run").due
    assert due is not None
    monkeypatch.setattr("cairn.service.catalog.rows.utc_now", lambda: due)
    monkeypatch.setattr("cairn.storage.runs.run.Run.clock", lambda _self: due, raising=False)
    run.objects.delete("lease.json")
    assert http.get(path, params={"refresh": True}).json()["state"] == "abandoned"


@BOTH
def test_two_control_planes_on_one_catalog_both_see_what_either_did(root, settings):
    run = make_run(root / "run", [1, 2])
    apps = [create_app(settings, jobs=False) for _ in range(2)]
    with (
        TestClient(apps[0], base_url=BASE_URL, client=PEER) as one,
        TestClient(apps[1], base_url=BASE_URL, client=PEER) as two,
    ):
        headers = {"If-None-Match": "*"}
        body = {"alias": "best"}
        assert two.get("/v1/runs").json()["runs"][0]["latest_step"] == 2
        assert one.post(f"{RUN}/checkpoints/1:promote", json=body, headers=headers).is_success
        assert two.get(f"{RUN}/aliases").json()["aliases"][0]["step"] == 1
        publish(run, 1, 3)
        assert two.post(f"{RUN}/checkpoints", json={"step": 3}).is_success
        assert one.get(RUN).json()["latest_step"] == 3


def test_a_root_that_takes_long_to_be_read_first_is_not_shown_in_part(http, root, monkeypatch):
    make_run(root / "run", [1])
    monkeypatch.setattr("cairn.service.catalog.refresh.FIRST_SCAN_SECONDS", 0.05)
    scanning = http.app.state.plane.index._scanning["default"]
    with scanning:
        answer = http.get("/v1/runs")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "0.05")
    assert len(http.get("/v1/runs").json()["runs"]) == 1


def test_a_store_that_does_not_answer_is_told_by_the_list_that_looks_only(http, root, monkeypatch):
    make_run(root / "run", [1])
    assert http.get("/v1/runs").is_success

    def silent(*_args, **_more):
        raise StoreUnavailableError("the store does not answer", path=root)

    monkeypatch.setattr("cairn.service.catalog.refresh.list_runs", silent)
    assert http.get("/v1/runs", params={"refresh": True}).status_code == 503
    assert len(http.get("/v1/runs").json()["runs"]) == 1


def test_settings_say_how_often_the_store_is_looked_at(root, tmp_path):
    settings = Settings(root=str(root), data_dir=tmp_path / "data", scan_seconds=0.05)
    with TestClient(create_app(settings, jobs=False), base_url=BASE_URL, client=PEER) as http:
        make_run(root / "run", [1])
        wait_for(lambda: http.get("/v1/runs").json()["runs"])


@BOTH
def test_text_that_a_database_cannot_hold_keeps_no_run_from_being_listed(http, root):
    for name in ("a", "b"):
        run = make_run(root / name, [1], labels={"team": "nlp\0", "x\0": "y"})
        annotate(run, 1, labels={"eval\0": "\0"}, metrics={"lo\0ss": 0.5})
        reason = f"so{chr(0)}{'long' * 9000}"
        promote_step(run, 1, "best", by="me\0", reason=reason, expect=None)
    runs = http.get("/v1/runs").json()["runs"]
    assert [run["name"] for run in runs] == ["a", "b"]
    assert runs[0]["labels"] == {"team": "nlp\0", "x\0": "y"}
    (alias,) = http.get("/v1/roots/default/runs/a/aliases").json()["aliases"]
    assert (alias["by"], len(alias["reason"])) == ("me\N{REPLACEMENT CHARACTER}", 2000)


@pytest.mark.parametrize("text", ["\0", "\ud800"])
def test_text_that_no_database_can_hold_is_refused_at_the_border(http, root, text):
    make_run(root / "run", [1])
    headers = {"If-None-Match": "*", "Content-Type": "application/json"}
    body = json.dumps({"alias": "best", "reason": f"a{text}"})
    answer = http.post(f"{RUN}/checkpoints/1:promote", content=body, headers=headers)
    assert answer.status_code == 422
    assert "expected text without NUL" in answer.json()["detail"]
    if text == "\0":
        answer = http.delete(f"{RUN}/checkpoints/1", params={"reason": "a\0"})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "query.reason")
        assert http.get("/v1/operations/a%00").status_code == 422
    assert http.get(f"{RUN}/checkpoints/1").json()["state"] == "listed"


def test_servers_that_first_look_at_a_store_together_all_answer(root, settings, postgresql):
    for number in range(8):
        make_run(root / f"run-{number}", [1, 2])
    shared = settings.model_copy(update={"database_url": postgresql.create()})
    indexes = [Index(Catalog.open(shared.database_url)) for _ in range(4)]
    roots = {"default": parse_uri(root)}
    together = threading.Barrier(8)

    def look(index):
        together.wait(SECONDS)
        index.ensure_scanned(roots)
        index.scan("default", roots["default"])

    with ThreadPoolExecutor(8) as pool:
        for looked in [pool.submit(look, index) for index in indexes * 2]:
            looked.result(SECONDS)
    with indexes[0].catalog.read() as session:
        assert rows.count(session) == (8, 16, 0)
    for index in indexes:
        index.catalog.close()


@BOTH
def test_a_promotion_is_not_taken_back_by_a_look_from_before_it(http, root, monkeypatch):
    run = make_run(root / "run", [1, 2])
    headers = {"If-None-Match": "*"}
    assert http.get("/v1/runs").is_success
    looked, promoted = threading.Event(), threading.Event()
    take_snapshot = refresh.take_snapshot

    def slow(*args):
        snapshot = take_snapshot(*args)
        if not looked.is_set():
            looked.set()
            assert promoted.wait(SECONDS)
        return snapshot

    monkeypatch.setattr(refresh, "take_snapshot", slow)
    publish(run, 1, 3)
    with ThreadPoolExecutor(1) as pool:
        refreshed = pool.submit(http.get, RUN, params={"refresh": True})
        assert looked.wait(SECONDS)
        body = {"alias": "best"}
        assert http.post(f"{RUN}/checkpoints/1:promote", json=body, headers=headers).is_success
        promoted.set()
        assert refreshed.result(SECONDS).json()["latest_step"] == 3
    assert http.get(f"{RUN}/aliases").json()["aliases"][0]["step"] == 1


def test_repaired_run_is_listed_as_it_is_then(http, root):
    make_run(root / "run", [1, 2])
    attempt = root / "run" / "attempts" / "1.json"
    attempt.write_bytes(attempt.read_bytes().replace(b'"writer"', b'"Writer"'))
    assert http.get(RUN, params={"refresh": True}).json()["problems"] != []
    report = http.post(f"{RUN}:repair", json={"dry_run": False}).json()
    assert [one["done"] for one in report["repairs"]] == [True]
    assert http.get(RUN).json()["problems"] == []
