"""Adoption over HTTP: a job that lists what plain Orbax has saved, wherever a root has it."""

import os
import shutil
import threading

import orbax.checkpoint as ocp
import pytest

from cairn import Run, adopt
from cairn.service.jobs.kinds import adopt as adopt_job
from tests.plain_orbax import TREE, manager
from tests.service.access.conftest import Keys, bearer
from tests.service.jobs import PATIENCE, done, save_llama, serving, watch
from tests.service.stores import begin_saving

ADOPT = "/v1/roots/default/runs:adopt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What plain Orbax has saved, which nobody changes."""
    folder = tmp_path_factory.mktemp("saved")
    manager(folder / "store" / "old")
    manager(folder / "more" / "team" / "older", steps=(7,))
    return folder


@pytest.fixture
def store(saved, tmp_path):
    return shutil.copytree(saved / "store", tmp_path / "store")


@pytest.fixture
def more(saved, tmp_path):
    return shutil.copytree(saved / "more", tmp_path / "more")


@pytest.fixture
def http(store, more, tmp_path):
    allowed = {"default": [str(more)]}
    with serving(store, tmp_path / "data", adopt_from=allowed) as client:
        yield client


def refused(http, body, status, slug):
    answer = http.post(ADOPT, json=body)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:cairn:problem:{slug}")
    return answer.json()


def steps(http, run, root="default"):
    listed = http.get(f"/v1/roots/{root}/runs/{run}/checkpoints?refresh=true").json()
    return [one["step"] for one in listed["checkpoints"]]


def test_folder_becomes_the_steps_of_a_run_that_is_listed_at_once(http, store):
    before = {path: path.stat().st_mtime_ns for path in (store / "old").rglob("*")}
    operation = done(http, ADOPT, {"folder": "old", "run": "adopted"})
    assert operation["kind"] == "adopt"
    assert operation["request"] == {
        "root": "default",
        "run": "adopted",
        "folder": f"file://{store}/old",
    }
    assert operation["result"] == {
        "root": "default",
        "run": "adopted",
        "adopted": [5, 10],
        "kept": [],
        "gone": [],
        "left": [],
    }
    assert steps(http, "adopted") == [10, 5]
    one = http.get("/v1/roots/default/runs/adopted/checkpoints/10").json()
    assert one["uri"] == f"file://{store}/old/10"
    assert {path: path.stat().st_mtime_ns for path in (store / "old").rglob("*")} == before
    verified = done(http, "/v1/roots/default/runs/adopted:verify", {})
    assert [step["sound"] for step in verified["result"]["steps"]] == [True, True]


def test_the_same_again_adds_what_is_new_and_says_what_is_gone(http, store):
    done(http, ADOPT, {"folder": "old", "run": "adopted"})
    with ocp.CheckpointManager(store / "old") as made:
        made.save(20, args=ocp.args.StandardSave(TREE))
        made.delete(5)
    again = done(http, ADOPT, {"folder": str(store / "old"), "run": "adopted"})["result"]
    assert (again["adopted"], again["kept"], again["gone"]) == ([20], [10], [5])
    assert steps(http, "adopted") == [20, 10, 5]


def test_one_checkpoint_is_adopted_as_the_step_that_is_said(http, store):
    operation = done(http, ADOPT, {"folder": "old/10", "run": "best", "step": 400})
    assert operation["result"]["adopted"] == [400]
    assert steps(http, "best") == [400]


def test_folder_may_lie_where_the_root_may_adopt_from(http, more):
    done(http, ADOPT, {"folder": f"file://{more}/team/older", "run": "adopted"})
    assert steps(http, "adopted") == [7]


@pytest.mark.parametrize(
    "folder", ["/etc", "file:///tmp", "gs://bucket/old", "/", "link", "{outside}"]
)
def test_folder_elsewhere_is_refused_and_nothing_made(http, store, tmp_path, folder):
    shutil.copytree(store / "old", tmp_path / "outside")
    os.symlink(tmp_path / "outside", store / "link")
    asked = folder.replace("{outside}", str(tmp_path / "outside"))
    told = refused(http, {"folder": asked, "run": "adopted"}, 409, "source-refused")
    assert "--adopt-from" in told["detail"]
    assert not (store / "adopted").exists()


@pytest.mark.parametrize("folder", ["../outside", "old/../../x", "old//5", "a\x01b"])
def test_folder_whose_name_can_not_be_is_refused(http, folder):
    refused(http, {"folder": folder, "run": "adopted"}, 422, "invalid-uri")


def test_folder_without_checkpoints_is_refused_before_anything_is_made(http, store):
    (store / "notes").mkdir()
    (store / "notes/readme.txt").write_text("nothing")
    save_llama(store / "llama")
    told = refused(http, {"folder": "notes", "run": "adopted"}, 422, "not-a-checkpoint")
    assert "notes" in told["detail"]
    refused(http, {"folder": "nowhere", "run": "adopted"}, 404, "not-found")
    refused(http, {"folder": "llama", "run": "adopted"}, 422, "invalid-uri")
    refused(http, {"folder": "old", "run": "old"}, 422, "invalid-uri")
    refused(http, {"folder": "old", "run": "adopted", "step": 3}, 422, "invalid-uri")
    assert not (store / "adopted").exists()


def test_name_of_another_run_is_taken(http, store):
    save_llama(store / "llama")
    told = refused(http, {"folder": "old", "run": "llama"}, 409, "run-exists")
    assert "adopts nothing" in told["detail"]


def test_folder_that_another_run_adopts_is_not_adopted_twice(http, store):
    done(http, ADOPT, {"folder": "old", "run": "first"})
    told = refused(http, {"folder": "old", "run": "second"}, 409, "already-adopted")
    assert (told["root"], told["run"]) == ("default", "first")
    assert not (store / "second").exists()
    done(http, ADOPT, {"folder": "old/10", "run": "best"})  # one of its checkpoints may be


def test_what_can_not_be_adopted_fails_the_operation_by_name_and_the_rest_stays(http, store):
    whole = store / "old/5/default/_METADATA"
    whole.write_bytes(whole.read_bytes()[:40])
    started = http.post(ADOPT, json={"folder": "old", "run": "adopted"})
    ended = watch(http, started.json()["id"])
    assert ended["state"] == "failed"
    assert ended["error"]["type"] == "urn:cairn:problem:not-all-adopted"
    assert ended["error"]["adopted"] == [10]
    (problem,) = ended["error"]["problems"]
    assert problem.startswith("5: ")
    assert steps(http, "adopted") == [10]


def test_run_that_a_job_writes_is_left_to_it(http, store):
    done(http, ADOPT, {"folder": "old", "run": "adopted"})
    begin_saving(Run.open(store / "adopted"), 30)
    with ocp.CheckpointManager(store / "old") as made:
        made.save(20, args=ocp.args.StandardSave(TREE))
    started = http.post(ADOPT, json={"folder": "old", "run": "adopted"})
    ended = watch(http, started.json()["id"])
    assert (ended["state"], ended["error"]["type"]) == ("failed", "urn:cairn:problem:lease-held")


def test_cancelled_adoption_keeps_whole_steps_and_goes_on_where_it_was(http, store, monkeypatch):
    looked, opened = threading.Event(), threading.Event()
    real = adopt_job.adopt

    def slow(*args, progress, **options):
        def told(done, total):
            looked.set()
            progress(done, total)
            while not opened.wait(0.01):
                progress(done, total)  # raises once it is cancelled

        return real(*args, progress=told, **options)

    monkeypatch.setattr(adopt_job, "adopt", slow)
    started = http.post(ADOPT, json={"folder": "old", "run": "adopted"}).json()
    assert looked.wait(PATIENCE)
    assert http.post(f"/v1/operations/{started['id']}:cancel").is_success
    opened.set()
    assert watch(http, started["id"])["state"] == "cancelled"
    assert steps(http, "adopted") == [5]
    assert http.post(f"/v1/operations/{started['id']}:resume").is_success
    ended = watch(http, started["id"])
    assert (ended["state"], ended["result"]["adopted"]) == ("succeeded", [10])
    assert ended["result"]["kept"] == [5]


def test_the_same_key_is_the_same_adoption(http):
    body, key = {"folder": "old", "run": "adopted"}, {"Idempotency-Key": "one"}
    first = done(http, ADOPT, body, key)
    assert http.post(ADOPT, json=body, headers=key).json()["id"] == first["id"]
    other = http.post(ADOPT, json={**body, "run": "other"}, headers=key)
    assert other.json()["type"] == "urn:cairn:problem:idempotency-key-reused"


def test_trail_says_who_adopted_what(http, store):
    operation = done(http, ADOPT, {"folder": "old", "run": "adopted"})
    found = http.get("/v1/audit-events", params={"filter": 'action = "run.adopt"'}).json()
    (event,) = found["audit_events"]
    assert (event["root"], event["run"]) == ("default", "adopted")
    assert event["detail"]["folder"] == f"file://{store}/old"
    assert event["detail"]["operation"] == operation["id"]


def test_keys_of_one_root_adopt_from_no_other(store, more, tmp_path):
    with serving(store, tmp_path / "data", roots={"more": str(more)}, auth="keys") as http:
        keys = Keys(http.app.state.plane.settings.database_url)
        reader = bearer(keys.make("reader", "read"))
        own = bearer(keys.make("own", "operate", roots=["default"]))
        body = {"folder": "old", "run": "adopted"}
        assert http.post(ADOPT, json=body, headers=reader).status_code == 403
        elsewhere = {**body, "folder": f"{more}/team/older"}
        answer = http.post(ADOPT, json=elsewhere, headers=own)
        assert answer.json()["type"] == "urn:cairn:problem:source-refused"
        assert http.post(ADOPT, json=body, headers=own).status_code == 202


def test_adoption_leaves_no_lease_behind(http, store):
    done(http, ADOPT, {"folder": "old", "run": "adopted"})
    again = adopt(str(store / "old"), str(store / "adopted"))  # by another, at once
    assert again.kept == (5, 10)
