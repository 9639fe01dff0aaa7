import threading
from pathlib import Path

import pytest

from cairn import Run, delete_step
from cairn.storage.runs.records.layout import manifest_file, step_dir
from tests.service.jobs import done, serving, watch
from tests.service.seams import trash
from tests.service.stores import begin_saving, end_saving, make_run
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/run"
GC = f"{RUN}:gc"


@pytest.fixture
def run(root):
    run = make_run(root / "run", [1, 2, 3])
    for step in (1, 2, 3):
        run.objects.write(f"{step_dir(1, step)}/model/data", b"12345")
    delete_step(run, run.step(1), by="me", reason="bad data", grace=0)
    delete_step(run, run.step(2), by="me", grace=3600)
    return run


@pytest.fixture
def http(root, tmp_path):
    with serving(root, tmp_path / "data") as client:
        yield client


def test_garbage_is_only_found_unless_asked_for(http, run):
    result = done(http, GC, {})["result"]
    assert (result["dry_run"], result["count"], result["bytes"]) == (True, 1, 5)
    (entry,) = result["entries"]
    assert (entry["kind"], entry["name"], entry["bytes"]) == ("trash", "attempts/1/1", 5)
    assert (entry["step"], entry["attempt"]) == (1, 1)
    assert "by me" in entry["reason"]
    assert run.objects.read(manifest_file(1, 1)) is not None
    assert http.get(f"{RUN}/checkpoints/1").json()["state"] == "trashed"


def test_garbage_is_removed_for_good_and_the_rest_stays(http, run):
    found = done(http, GC, {"dry_run": True})["result"]["entries"]
    operation = done(http, GC, {"dry_run": False})
    assert operation["result"]["entries"] == found
    assert operation["progress"]["done_bytes"] == operation["result"]["bytes"] == 5
    assert not Path(run.uri.local_path, step_dir(1, 1)).exists()
    answer = http.get(f"{RUN}/checkpoints/1")
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:cairn:problem:step-not-found")
    assert http.post(f"{RUN}/checkpoints/1:undelete", json={}).status_code == 404
    assert http.post(f"{RUN}/checkpoints/2:undelete", json={}).json()["state"] == "listed"
    assert [info.step for info in run.steps()] == [2, 3]
    assert done(http, GC, {"dry_run": False})["result"]["count"] == 0


def test_writers_save_is_left_alone_and_removed_once_its_writer_has_gone(http, run):
    writing = begin_saving(run, 4)
    assert [one["kind"] for one in done(http, GC, {})["result"]["entries"]] == ["trash"]
    end_saving(run, writing)
    entries = done(http, GC, {"dry_run": False})["result"]["entries"]
    assert [(one["kind"], one["name"]) for one in entries] == [
        ("trash", "attempts/1/1"),
        ("abandoned", "attempts/2/4"),
    ]


def test_cancelled_collection_ends_after_what_it_was_removing(http, run, monkeypatch):
    delete_step(run, run.step(3), by="me", grace=0)
    reached = threading.Event()

    def wait_for_the_cancellation(found, key, **options):
        (execution,) = http.app.state.plane.jobs.worker._running()
        reached.set()
        assert execution.interrupted.wait(60)
        return trash.begin_removal(found, key, **options)

    with monkeypatch.context() as patched:
        patched.setattr("cairn.storage.runs.gc.begin_removal", wait_for_the_cancellation)
        started = http.post(GC, json={"dry_run": False}).json()
        assert reached.wait(60)
        answer = http.post(f"/v1/operations/{started['id']}:cancel")
        assert answer.json()["state"] == "cancelled"
    assert [one.step for one in Run.open(run.uri).all_states()] == [2, 3]
    http.post(f"/v1/operations/{started['id']}:resume")
    assert [one["step"] for one in watch(http, started["id"])["result"]["entries"]] == [3]


def test_operation_is_listed_with_its_run(http, run):
    operation = done(http, GC, {})
    (listed,) = http.get("/v1/operations").json()["operations"]
    assert (listed["kind"], listed["request"]["run"]) == ("gc", "run")
    assert listed["id"] == operation["id"]


def test_removal_and_a_look_are_told_apart_in_the_audit_trail(http, run):
    looked = done(http, GC, {})
    removed = done(http, GC, {"dry_run": False})
    entries = audit_trail(http)
    assert {(entry.action, entry.caller, entry.run) for entry in entries} == {
        ("run.gc", "loopback", "run")
    }
    assert [entry.detail for entry in entries] == [
        {"dry_run": True, "operation": looked["id"]},
        {"dry_run": False, "operation": removed["id"]},
    ]


def test_unknown_field_is_refused_and_nothing_removed(http, run):
    answer = http.post(GC, json={"dryrun": False})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "body.dryrun")
    assert http.get("/v1/operations").json()["operations"] == []
