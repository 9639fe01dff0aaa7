"""Databases that are away, locked or full, and clocks that jump: nothing is lost, no 500."""

import json
import sqlite3
import threading
import time
from contextlib import closing, contextmanager

import pytest
from sqlalchemy import Engine, event

from cairn import Run, parse_uri
from tests.service.databases import running_postgresql
from tests.service.jobs import Hold, artifact_of, done, save_llama, serving, tries, until, watch
from tests.service.stores import make_run

RUN = "/v1/roots/default/runs/llama"
CONVERT = f"{RUN}/checkpoints/1:convert"
PROMOTE = f"{RUN}/checkpoints/1:promote"
CREATE = {"If-None-Match": "*"}


def problem_of(answer):
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].rpartition(":")[2]


def test_a_job_outlives_a_postgresql_that_is_stopped_and_started(root, tmp_path, monkeypatch):
    save_llama(root / "llama")
    hold = Hold(monkeypatch)
    told, opened = [], threading.Event()

    def listen(http, operation):
        with http.stream("GET", f"/v1/operations/{operation}/events") as stream:
            for line in stream.iter_lines():
                opened.set()
                if line.startswith("data: "):
                    told.append(json.loads(line.removeprefix("data: ")))

    with running_postgresql() as server:
        url = server.create()
        with serving(
            root, tmp_path / "data", scan_seconds=0, database_url=url, jobs_database_url=url
        ) as http:
            asked = http.post(CONVERT, json={"max_shard_size": "40KB"}).json()
            assert hold.reached.wait(20)
            stream = threading.Thread(target=listen, args=(http, asked["id"]))
            stream.start()
            assert opened.wait(20)
            server.stop()
            try:
                away = (503, "database-unavailable")
                assert problem_of(http.get("/v1/runs")) == away
                assert problem_of(http.get(f"/v1/operations/{asked['id']}")) == away
                assert problem_of(http.get("/v1/operations")) == away
                assert problem_of(http.post(CONVERT, json={})) == away
                assert http.get("/readyz").status_code == 503
                assert http.get("/healthz").is_success
                hold.opened.set()
                time.sleep(1)  # the job meets it
            finally:
                server.start()
            until(lambda: http.get("/readyz").is_success)
            stream.join(60)
            assert told[-1]["state"] == "succeeded", told[-1]
            assert artifact_of(http, told[-1])["files"]
            assert [run["name"] for run in http.get("/v1/runs").json()["runs"]] == ["llama"]
            operations = http.get("/v1/operations").json()["operations"]
            assert [one["id"] for one in operations] == [asked["id"]]
    assert len(tries(root, "llama")) == 1


@contextmanager
def locked(path, seconds):
    """Another process that writes a database, and takes its time."""
    with closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(seconds, lambda: other.execute("ROLLBACK"))
        timer.start()
        try:
            yield
        finally:
            timer.join()


@pytest.mark.parametrize("name", ["catalog", "jobs"])
def test_a_locked_database_is_waited_for(root, tmp_path, name):
    save_llama(root / "llama")
    data = tmp_path / "data"
    with serving(root, data, scan_seconds=0) as http:
        assert http.get("/v1/runs").is_success
        with locked(data / f"{name}.sqlite", 2):
            assert http.get(f"{RUN}/checkpoints").is_success  # readers do not wait
            assert http.get("/v1/operations").is_success
            assert http.post(PROMOTE, json={"alias": "best"}, headers=CREATE).status_code == 200
            asked = http.post(CONVERT, json={})
            assert asked.status_code == 202, asked.text
        assert watch(http, asked.json()["id"])["state"] == "succeeded"
        aliases = http.get(f"{RUN}/aliases").json()["aliases"]
        assert [one["alias"] for one in aliases] == ["best"]


@contextmanager
def full(name):
    """No database of this name grows any more."""
    limited = []

    def limit(connection, _record, _proxy):
        path = connection.execute("PRAGMA database_list").fetchone()[2]
        if path.endswith(f"{name}.sqlite"):
            ((pages,),) = connection.execute("PRAGMA page_count").fetchall()
            connection.execute(f"PRAGMA max_page_count={pages}").close()
            limited.append(connection)

    event.listen(Engine, "checkout", limit)
    try:
        yield
    finally:
        event.remove(Engine, "checkout", limit)
        for connection in limited:
            connection.execute("PRAGMA max_page_count=1073741823").close()


def test_jobs_are_refused_while_their_disk_is_full_and_none_that_was_accepted_is_lost(
    root, tmp_path
):
    save_llama(root / "llama")
    data = tmp_path / "data"
    with serving(root, data, scan_seconds=0) as http:
        made = done(http, CONVERT, {})
    with serving(root, data, scan_seconds=0, worker=False) as http, full("jobs"):
        answers = [
            http.post(CONVERT, json={"max_shard_size": f"{size}MB"}) for size in range(20, 60)
        ]
        assert http.get(f"/v1/operations/{made['id']}").json() == made
    refused = [answer for answer in answers if answer.status_code != 202]
    assert refused
    assert {problem_of(answer) for answer in refused} == {(507, "database-full")}
    with serving(root, data, scan_seconds=0) as http:
        for answer in answers:
            if answer.status_code == 202:
                assert watch(http, answer.json()["id"])["state"] == "succeeded"
        assert done(http, CONVERT, {"max_shard_size": "61MB"})["state"] == "succeeded"
        known = {one["id"] for one in http.get("/v1/operations").json()["operations"]}
        assert len(known) == 2 + len(answers) - len(refused)


def test_a_full_disk_of_the_catalog_refuses_changes_and_takes_nothing_from_the_store(http, root):
    run = make_run(root / "llama", [1])
    assert http.get("/v1/runs").is_success
    with full("catalog"):
        answers = []
        for number in range(40):
            body = {"alias": f"alias-{number}", "reason": "why not" * 200}
            answers.append(http.post(PROMOTE, json=body, headers=CREATE))
        refused = [answer for answer in answers if not answer.is_success]
        assert problem_of(refused[-1]) == (507, "database-full")
        moved = 40 - len(refused)
        assert len(run.aliases.list()) == moved  # what the audit trail can't hold is not done
        make_run(root / "other", range(60))
        assert problem_of(http.get("/v1/runs?refresh=true")) == (507, "database-full")
        assert [one["name"] for one in http.get("/v1/runs").json()["runs"]] == ["llama"]
    found = http.get("/v1/runs?refresh=true").json()["runs"]
    assert [one["name"] for one in found] == ["llama", "other"]
    assert len(http.get(f"{RUN}/aliases").json()["aliases"]) == moved


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_jumps_harms_no_job_and_no_list(root, tmp_path, monkeypatch, hours):
    save_llama(root / "llama")
    hold = Hold(monkeypatch)
    real, real_ns = time.time, time.time_ns
    seconds = hours * 3600
    with serving(root, tmp_path / "data", scan_seconds=0) as http:
        before = http.post(CONVERT, json={}).json()
        assert hold.reached.wait(20)
        monkeypatch.setattr(time, "time", lambda: real() + seconds)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + seconds * 10**9)
        after = http.post(CONVERT, json={"max_shard_size": "40KB"}).json()
        hold.opened.set()
        for operation in (before, after):
            assert watch(http, operation["id"])["state"] == "succeeded"
        listed, token = [], None
        while True:
            page = http.get(
                "/v1/operations",
                params={"page_size": 1, **({"page_token": token} if token else {})},
            ).json()
            listed += [one["id"] for one in page["operations"]]
            token = page["next_page_token"]
            if token is None:
                break
        assert sorted(listed) == sorted([before["id"], after["id"]])
        assert http.post(PROMOTE, json={"alias": "best"}, headers=CREATE).is_success
    assert Run.open(parse_uri(root / "llama")).aliases.require("best").step == 1
