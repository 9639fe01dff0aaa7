"""What the catalog alone answers is read in turn; a slow database keeps nothing else waiting."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from cairn.service.catalog import queries
from cairn.service.catalog.engine import Catalog
from tests.service.conftest import BASE_URL, PEER
from tests.service.seams import refresh
from tests.service.stores import make_run

RUN = "/v1/roots/default/runs/run"
READS = ("/v1/runs", RUN, f"{RUN}/checkpoints", f"{RUN}/checkpoints/1", f"{RUN}/aliases")
CREATE = {"If-None-Match": "*"}


@pytest.fixture
def served(root, tmp_path, some_database_url):
    """A control plane over a run that it knows."""
    make_run(root / "run", [1])
    settings = Settings(
        root=str(root), data_dir=tmp_path / "data", database_url=some_database_url, scan_seconds=0
    )
    app = create_app(settings, jobs=False)
    with TestClient(app, base_url=BASE_URL, client=PEER) as http:
        assert http.get("/v1/runs").is_success
        yield app, http


def test_the_catalog_is_read_by_as_many_as_get_their_answers_soonest(served, monkeypatch):
    app, http = served
    query, inside, most, lock = Catalog.query, set(), [], threading.Lock()

    @contextmanager
    def counted(self):
        me = threading.get_ident()
        with lock:
            inside.add(me)
            most.append(len(inside))
        try:
            with query(self) as connection:
                yield connection
        finally:
            with lock:
                inside.discard(me)

    monkeypatch.setattr(Catalog, "query", counted)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(http.get, READS * 20))
    assert all(answer.is_success for answer in answers)
    assert len(most) >= 100
    assert max(most) <= app.state.plane.catalog.reads_at_once


def test_readers_of_a_silent_database_are_told_and_all_else_goes_on(served, monkeypatch):
    app, http = served
    over, asked, query = threading.Event(), threading.Semaphore(0), Catalog.query

    @contextmanager
    def silent(self):
        asked.release()
        over.wait(60)
        with query(self) as connection:
            yield connection

    monkeypatch.setattr("cairn.service.http.limiters.WAIT_SECONDS", 0.2)
    monkeypatch.setattr(Catalog, "query", silent)
    held = app.state.plane.catalog.reads_at_once
    with ThreadPoolExecutor(held) as pool:
        waiting = [pool.submit(http.get, RUN) for _ in range(held)]
        for _ in waiting:
            assert asked.acquire(timeout=30)
        refused = http.get(f"{RUN}/checkpoints")
        assert http.get("/healthz").is_success
        over.set()
        assert all(one.result(30).is_success for one in waiting)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    assert "database is slow" in refused.json()["detail"]
    assert http.get(f"{RUN}/checkpoints").is_success


def test_what_the_catalog_does_not_know_is_found_out_of_turn(served, root):
    _, http = served
    make_run(root / "later", [7])
    assert http.get("/v1/roots/default/runs/later").json()["checkpoint_count"] == 1
    make_run(root / "latest", [7])
    found = http.get("/v1/roots/default/runs/latest/checkpoints/7")
    assert found.json()["state"] == "listed"
    assert http.get("/v1/roots/default/runs/none").status_code == 404
    assert http.get(f"{RUN}/checkpoints/404").status_code == 404
    assert http.get(f"{RUN}/aliases/none").status_code == 404


def test_who_writes_beside_others_waits_and_is_told_if_that_takes_long(http, root, monkeypatch):
    make_run(root / "run", [1])
    assert http.get(RUN).is_success
    promote = f"{RUN}/checkpoints/1:promote"
    with ThreadPoolExecutor(1) as pool:
        with http.app.state.plane.catalog.write():
            waiting = pool.submit(http.post, promote, json={"alias": "a"}, headers=CREATE)
            assert http.get(f"{RUN}/checkpoints").is_success  # readers do not wait
            assert not waiting.done()
        assert waiting.result(30).is_success
        monkeypatch.setattr("cairn.service.catalog.engine.BUSY_TIMEOUT_SECONDS", 0.2)
        with http.app.state.plane.catalog.write():
            refused = http.post(promote, json={"alias": "b"}, headers=CREATE)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert refused.json()["type"] == "urn:cairn:problem:database-busy"
    assert [one["alias"] for one in http.get(f"{RUN}/aliases").json()["aliases"]] == ["a"]


def test_many_who_ask_for_a_run_that_was_made_just_now_all_find_it(http, root, monkeypatch):
    """Some look at the store, which takes its time; none is told that others look already."""
    look = refresh.change_token
    monkeypatch.setattr(refresh, "change_token", lambda uri: time.sleep(0.2) or look(uri))
    make_run(root / "new", [1])
    paths = [f"/v1/roots/default/runs/new/{what}" for what in ("aliases", "checkpoints")]
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(http.get, paths * 25))
    assert {answer.status_code for answer in answers} == {200}


def test_a_search_that_takes_long_keeps_other_readers_from_nothing(served, monkeypatch):
    app, http = served
    over, begun, search = threading.Event(), threading.Semaphore(0), queries.search_checkpoints

    def slow(*arguments, **options):
        begun.release()
        assert over.wait(60)
        return search(*arguments, **options)

    monkeypatch.setattr(queries, "search_checkpoints", slow)
    monkeypatch.setattr("cairn.service.http.limiters.WAIT_SECONDS", 0.5)
    held = app.state.plane.catalog.reads_at_once
    searched = f"{RUN}/checkpoints?filter=step>0&order_by=created"
    with ThreadPoolExecutor(held) as pool:
        searches = [pool.submit(http.get, searched) for _ in range(held)]
        for _ in searches:
            assert begun.acquire(timeout=30)
        answers = [http.get(path) for path in READS]
        refused = http.get(searched)
        over.set()
        found = [one.result().json()["checkpoints"] for one in searches]
    assert all(answer.is_success for answer in answers)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert [len(one) for one in found] == [1] * held
