"""Servers that enqueue and workers that execute, in processes of their own, over one database."""

import os
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress

import pytest
from fastapi.testclient import TestClient

from cairn import Settings, create_app, delete_step
from cairn.service.access.callers import Caller, Scope
from cairn.service.actions import workers as workers_actions
from cairn.service.jobs.errors import JobsBusyError
from cairn.service.jobs.worker_names import worker_name
from tests.programs.program import Program
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import done, save_llama, until, watch
from tests.service.receivers import receiving
from tests.service.seams import worker_names
from tests.service.stores import make_run

STEP = "/v1/roots/default/runs/llama/checkpoints/1"


BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"])


@pytest.fixture
def database():
    """The kind of database; tests of what depends on it ask for both."""
    return "sqlite"


@pytest.fixture
def settings(request, root, tmp_path, database):
    """Of a server without a worker."""
    given = {"root": str(root), "data_dir": tmp_path / "data", "scan_seconds": 0, "worker": False}
    if database == "postgresql":
        url = request.getfixturevalue("postgresql").create()
        given |= {"database_url": url, "jobs_database_url": url}
    (tmp_path / "data").mkdir()
    return Settings(**given)


@pytest.fixture
def http(settings):
    with TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as client:
        yield client


@contextmanager
def working(settings, name, program=("-m", "cairn.service.command.cli", "worker"), **variables):
    """A worker in a process of its own."""
    process = Program(
        [*program, "--name", name],
        env={
            **os.environ,
            "CAIRN_ROOT": settings.root,
            "CAIRN_DATA_DIR": str(settings.data_dir),
            "CAIRN_DATABASE_URL": settings.database_url,
            "CAIRN_JOBS_DATABASE_URL": settings.jobs_database_url,
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        process.wait(60)


def started(process):
    assert process.stdout.readline().startswith("cairn: worker ")
    return process


def workers(http):
    return {one["name"]: one for one in http.get("/v1/workers").json()["workers"]}


def test_a_worker_beside_the_server_does_what_the_server_is_asked(http, root, settings):
    save_llama(root / "llama")
    asked = http.post(f"{STEP}:convert", json={}).json()
    assert http.get(f"/v1/operations/{asked['id']}").json()["state"] == "pending"
    with working(settings, "one") as process:
        started(process)
        assert watch(http, asked["id"])["state"] == "succeeded"
        forked = done(http, f"{STEP}:restore", {"mode": "fork", "run": "child"})
        assert forked["result"]["run"] == "child"
        # The worker has told the catalog that they share.
        names = [run["name"] for run in http.get("/v1/runs").json()["runs"]]
        assert names == ["child", "llama"]
        assert (workers(http)["one"]["alive"], workers(http)["one"]["process"]) == (
            True,
            process.pid,
        )
        process.terminate()
        assert process.wait(60) == 0
    assert workers(http)["one"]["alive"] is False


@BOTH
def test_a_name_is_that_of_one_live_worker(http, settings):
    with working(settings, "one") as first:
        started(first)
        with working(settings, "one") as second:
            assert second.wait(60) == 1
            assert "called 'one'" in second.stderr.read()
        with working(settings, "two") as other:
            started(other)
            assert {name for name, one in workers(http).items() if one["alive"]} == {"one", "two"}
        answer = http.post("/v1/workers/one:takeOver")
        assert (answer.status_code, answer.json()["type"]) == (
            409,
            "urn:cairn:problem:worker-alive",
        )
    assert http.post("/v1/workers/none:takeOver").status_code == 404
    name = worker_name(settings, "one")
    until(lambda: not name.is_held())  # PostgreSQL ends a connection when it comes to it
    name.acquire(lambda: None)
    assert worker_name(settings, "one").is_held()
    with pytest.raises(JobsBusyError, match="'one'"):
        worker_name(settings, "one").acquire(lambda: None)
    name.release()
    until(lambda: not worker_name(settings, "one").is_held())


@pytest.mark.parametrize("database", ["postgresql"])
def test_what_a_killed_worker_has_left_goes_on_elsewhere_once_it_is_taken_over(
    http, root, settings, tmp_path
):
    save_llama(root / "llama")
    reached = tmp_path / "reached"
    program = ("-m", "tests.service.stalling_worker", str(reached))
    with working(settings, "one", program) as process:
        asked = http.post(f"{STEP}:convert", json={}).json()
        until(reached.exists)
        assert workers(http)["one"]["running"] == [asked["id"]]
        stranger = Caller("stranger", Scope.READ, frozenset({"elsewhere"}))
        assert [
            one.running for one in workers_actions.list_workers(http.app.state.plane, stranger)
        ] == [[]]
        process.kill()
        process.wait(60)
    with working(settings, "two") as other:
        started(other)
        until(lambda: not workers(http)["one"]["alive"])
        taken = http.post("/v1/workers/one:takeOver").json()
        assert taken == {"operations": [asked["id"]]}
        ended = watch(http, asked["id"])
        assert ended["state"] == "succeeded", ended
        assert set(workers(http)) == {"two"}
    assert len(list((root / "llama/exports").glob("*/*/*.json"))) <= 1


def test_a_cancelled_job_of_a_worker_elsewhere_leaves_nothing(http, root, settings):
    save_llama(root / "llama")
    asked = http.post(f"{STEP}:convert", json={}).json()
    assert http.post(f"/v1/operations/{asked['id']}:cancel").json()["state"] == "cancelled"
    with working(settings, "one") as process:
        started(process)
        assert done(http, f"{STEP}:verify", {})["state"] == "succeeded"
    assert http.get(f"/v1/operations/{asked['id']}").json()["state"] == "cancelled"


def test_what_a_worker_has_done_of_a_job_is_listed_once_it_is_cancelled(http, root):
    run = make_run(root / "run", range(1, 5))
    place = "/v1/roots/default/runs/run"
    assert http.get(place).json()["checkpoint_count"] == 4
    policy = {"policy": {"keep_last": 1}, "dry_run": False}
    asked = http.post(f"{place}:applyRetention", json=policy).json()
    delete_step(run, run.step(1), by="a worker that is gone")
    assert http.get(place).json()["checkpoint_count"] == 4  # nobody has said anything
    assert http.post(f"/v1/operations/{asked['id']}:cancel").json()["state"] == "cancelled"
    assert http.get(place).json()["checkpoint_count"] == 3


def test_a_server_without_a_worker_is_ready(http):
    assert http.get("/readyz").is_success


def test_a_name_that_somebody_asks_about_is_not_taken_for_one_that_is_held(tmp_path):
    name, asked = (worker_names.FileName(tmp_path, "one") for _ in range(2))
    name.acquire(lambda: None)
    name.release()
    over = threading.Event()

    def ask():
        while not over.is_set():
            asked.is_held()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(500):
            name.acquire(lambda: None)
            name.release()
    finally:
        over.set()
        for thread in threads:
            thread.join()


def steps_of(receiver):
    return [one["detail"]["step"] for one in receiver.taken()]


@pytest.mark.parametrize("database", ["postgresql"])
def test_workers_tell_webhooks_and_another_goes_on_when_one_is_killed(root, settings):
    make_run(root / "run", [3, 6])
    allowed = {"CAIRN_WEBHOOK_NETWORKS": "127.0.0.0/8"}
    settings = settings.model_copy(update={"webhook_networks": "127.0.0.0/8"})
    with (
        TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as http,
        receiving() as receiver,
    ):
        http.get("/v1/runs")
        http.post("/v1/webhooks", json={"url": receiver.url, "kinds": ["alias.moved"]})
        headers = {"If-None-Match": "*"}
        with working(settings, "one", **allowed) as one, working(settings, "two", **allowed) as two:
            for process in (one, two):
                started(process)
            for step, kill in ((3, one), (6, two)):
                path = f"/v1/roots/default/runs/run/checkpoints/{step}:promote"
                answer = http.post(path, json={"alias": "production"}, headers=headers)
                headers = {"If-Match": answer.headers["ETag"]}
                receiver.wait(lambda step=step: step in steps_of(receiver))
                kill.send_signal(signal.SIGKILL)
                kill.wait(60)
        assert [*dict.fromkeys(steps_of(receiver))] == [3, 6]
