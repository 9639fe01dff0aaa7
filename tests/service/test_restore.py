import json
import shutil
import threading

import pytest

from cairn import CheckpointReader, Run, StoreUnavailableError
from tests.service.commands import cairn_here, cairn_on_a_terminal
from tests.service.jobs import done, save_llama, serving, watch
from tests.service.planes import running_plane
from tests.service.seams import fork, lease
from tests.service.stores import begin_saving
from tests.service.test_errors import check_problem

ROLLBACK = {"mode": "rollback"}
ANY = {"If-Match": "*"}
RESTORE = "/v1/roots/default/runs/llama/checkpoints/1:restore"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that nobody changes."""
    run = tmp_path_factory.mktemp("saved") / "llama"
    return run, save_llama(run, steps=(1, 2, 3))


@pytest.fixture
def store(saved, tmp_path):
    run, leaves = saved
    root = tmp_path / "store"
    shutil.copytree(run, root / "llama")
    return root, leaves


@pytest.fixture
def http(store, tmp_path):
    with serving(store[0], tmp_path / "data") as client:
        yield client


def test_fork_is_a_run_of_its_own_with_its_parent_named(http, store):
    root, saved = store
    operation = done(http, RESTORE, {"mode": "fork", "run": "child"})
    result = operation["result"]
    assert (result["root"], result["run"], result["step"]) == ("default", "child", 1)
    assert operation["progress"]["done_bytes"] == operation["progress"]["total_bytes"] > 0
    body = http.get("/v1/roots/default/runs/child").json()
    assert (body["latest_step"], body["checkpoint_count"]) == (1, 1)
    assert (body["lineage"]["run"], body["lineage"]["step"]) == (f"file://{root}/llama", 1)
    child = Run.open(root / "child")
    reader = CheckpointReader.open(child.step_uri(child.step(1)), child.manifest(child.step(1)))
    for path, leaf in saved[1].items():
        assert reader.read("model", path).tobytes() == leaf.tobytes()
    manifest = child.manifest(child.step(1))
    assert result["checked"] == "crc32c and content sum of the copied bytes"
    assert result["checked_files"] == manifest.index.files
    assert result["checked_bytes"] == result["bytes"] == manifest.nbytes


def test_fork_of_a_step_with_a_damaged_file_fails_and_leaves_nothing(http, store):
    damaged = next((store[0] / "llama/attempts/1/1/model/d").iterdir())
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    ended = watch(http, http.post(RESTORE, json={"run": "child"}).json()["id"])
    assert (ended["state"], ended["error"]["type"]) == ("failed", "urn:cairn:problem:corrupt")
    assert f"model/d/{damaged.name}: crc32c" in str(ended["error"])
    assert not (store[0] / "child").exists()
    assert damaged.read_bytes() == data


def test_fork_can_be_exported_and_written_on(http, store):
    done(http, RESTORE, {"run": "child"})
    done(http, RESTORE.replace("llama", "child").replace(":restore", ":convert"), {})
    save_llama(store[0] / "child", steps=(2,))
    assert [info.step for info in Run.open(store[0] / "child").steps()] == [1, 2]


def test_name_that_is_taken_is_refused_at_once_and_that_run_left_alone(http, store):
    save_llama(store[0] / "other", steps=(5,))  # nobody has told the catalog of it
    check_problem(answer := http.post(RESTORE, json={"run": "other"}), 409)
    assert answer.json()["type"] == "urn:cairn:problem:run-exists"
    assert "/other: expected no run, found one. Choose another name" in answer.json()["detail"]
    assert http.get("/v1/operations").json()["operations"] == []
    assert [info.step for info in Run.open(store[0] / "other").steps()] == [5]


def test_folder_of_something_else_and_run_without_its_record_are_taken_names(http, store):
    (store[0] / "notes").mkdir()
    (store[0] / "notes" / "read.me").write_text("mine")
    save_llama(store[0] / "headless", steps=(5,))
    (store[0] / "headless" / "run.json").unlink()
    for name, found in (("notes", "found read.me"), ("headless", "lost its record")):
        check_problem(answer := http.post(RESTORE, json={"run": name}), 409)
        assert found in answer.json()["detail"]
    assert (store[0] / "notes" / "read.me").read_text() == "mine"


def test_name_that_is_taken_between_request_and_copy_fails_the_job(http, store, monkeypatch):
    monkeypatch.setattr("cairn.service.actions.restore.refuse_taken", lambda target: None)
    save_llama(store[0] / "other", steps=(5,))
    ended = watch(http, http.post(RESTORE, json={"run": "other"}).json()["id"])
    assert (ended["state"], ended["error"]["status"]) == ("failed", 412)
    assert [info.step for info in Run.open(store[0] / "other").steps()] == [5]


def test_fork_that_is_asked_for_again_under_its_key_is_the_same_operation(http):
    key = {"Idempotency-Key": "once"}
    first = http.post(RESTORE, json={"run": "child"}, headers=key).json()
    assert watch(http, first["id"])["state"] == "succeeded"
    again = http.post(RESTORE, json={"run": "child"}, headers=key)
    assert (again.status_code, again.json()["id"]) == (202, first["id"])
    other = http.post(RESTORE, json={"run": "child"}, headers={"Idempotency-Key": "twice"})
    check_problem(other, 409)


def test_fork_that_is_asked_for_again_while_it_goes_on_is_the_same_operation(
    http, store, monkeypatch
):
    begun, go_on = threading.Event(), threading.Event()
    real = fork.copy_step_files

    def wait_first(*arguments):
        begun.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(fork, "copy_step_files", wait_first)
    first = http.post(RESTORE, json={"run": "child"}).json()
    assert begun.wait(30)
    assert (store[0] / "child" / "run.json").is_file()
    again = http.post(RESTORE, json={"run": "child"})
    check_problem(http.post(RESTORE.replace("/1:", "/2:"), json={"run": "child"}), 409)
    go_on.set()
    assert (again.status_code, again.json()["id"]) == (202, first["id"])
    assert watch(http, first["id"])["state"] == "succeeded"


def test_rollback_sets_later_steps_aside(http, store):
    run = Run.open(store[0] / "llama")
    operation = done(http, RESTORE.replace("/1:", "/2:"), ROLLBACK, ANY)
    assert operation["result"]["superseded"] == [3]
    assert [info.step for info in run.steps()] == [1, 2]
    save_llama(store[0] / "llama", steps=(3,))
    assert [info.step for info in run.steps()] == [1, 2, 3]


def test_rollback_that_is_taken_up_again_still_names_what_it_superseded(http, store, monkeypatch):
    """It had begun its attempt when the store went away, or the process did."""
    monkeypatch.setattr("cairn.service.jobs.execution.STEP_RETRY_SECONDS", (0.0,))
    answers = iter([StoreUnavailableError("no answer", path="lease.json")])

    def lose_once(objects, attempt, **options):
        if lost := next(answers, None):
            raise lost
        lease.release(objects, attempt, **options)

    monkeypatch.setattr("cairn.storage.runs.rollback.release", lose_once)
    operation = done(http, RESTORE, ROLLBACK, ANY)
    assert operation["result"]["superseded"] == [2, 3]
    run = Run.open(store[0] / "llama")
    assert [attempt.number for attempt in run.attempts()] == [1, operation["result"]["attempt"]]


def test_rollback_names_the_aliases_it_strands(http):
    promote = RESTORE.replace("/1:restore", "/3:promote")
    body = {"alias": "production"}
    assert http.post(promote, json=body, headers={"If-None-Match": "*"}).status_code < 300
    refused = http.post(RESTORE, json=ROLLBACK | {"strand": ["other"]}, headers=ANY)
    problem = check_problem(refused, 409)
    assert problem["type"] == "urn:cairn:problem:aliases-stranded"
    assert "Aliases point to steps after 1: production (step 3). Prom" in problem["detail"]
    assert problem["aliases"] == ["production"]
    operation = done(http, RESTORE, ROLLBACK | {"strand": ["production"]}, ANY)
    assert operation["result"]["aliases_superseded"] == ["production"]


def test_rollback_past_what_was_not_seen_is_refused(http, store):
    run = RESTORE.partition("/checkpoints")[0]
    check_problem(http.post(RESTORE, json=ROLLBACK), 428)
    seen = {"If-Match": http.get(run).headers["ETag"]}
    save_llama(store[0] / "llama", steps=(4,))
    refused = http.post(RESTORE, json=ROLLBACK, headers=seen)
    check_problem(refused, 412)
    assert refused.json()["current"]["latest_step"] == 4
    seen = {"If-Match": http.get(run).headers["ETag"]}
    assert done(http, RESTORE, ROLLBACK, seen)["result"]["superseded"] == [2, 3, 4]


def test_rollback_that_is_asked_for_again_is_the_same(http):
    headers = {"If-Match": http.get(RESTORE.partition("/checkpoints")[0]).headers["ETag"]}
    headers["Idempotency-Key"] = "once"
    first = http.post(RESTORE, json=ROLLBACK, headers=headers).json()
    assert watch(http, first["id"])["state"] == "succeeded"
    again = http.post(RESTORE, json=ROLLBACK, headers=headers)
    assert (again.status_code, again.json()["id"]) == (202, first["id"])


def test_rollback_of_a_run_that_is_written_is_a_conflict(http, store):
    begin_saving(Run.open(store[0] / "llama"), 4)
    ended = watch(http, http.post(RESTORE, json=ROLLBACK, headers=ANY).json()["id"])
    assert ended["state"] == "failed"
    assert (ended["error"]["status"], ended["error"]["holder"]) == (409, "trainer")
    assert [info.step for info in Run.open(store[0] / "llama").steps()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (RESTORE, {"mode": "fork"}, 422),
        (RESTORE, {"mode": "rollback", "run": "child"}, 422),
        (RESTORE, {"mode": "merge", "run": "child"}, 422),
        (RESTORE, {"run": "child", "strand": ["production"]}, 422),
        (RESTORE, {"run": "../child"}, 422),
        (RESTORE, {"run": ".hidden"}, 422),
        (RESTORE.replace("/1:", "/9:"), {"run": "child"}, 404),
        (RESTORE.replace("llama", "nobody"), {"run": "child"}, 404),
    ],
)
def test_impossible_requests_are_refused_at_once(http, store, path, body, status):
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert not (store[0] / "child").exists()


def test_rollback_in_the_shell_names_what_it_superseded(store, tmp_path):
    (tmp_path / "data").mkdir()
    with running_plane(store[0], tmp_path / "data") as (url, _):
        made = cairn_here("promote", "llama", "3", "production", "--create", url=url)
        assert made.returncode == 0, made.stderr
        rollback = ("rollback", "llama/steps/1")
        status, shown = cairn_on_a_terminal(*rollback, url=url, typed="n\n")
        assert (status, "Nothing was changed." in shown) == (1, True)
        assert "2 steps, 2 to 3, would be superseded" in " ".join(shown.split())
        assert "cairn promote llama 1 ALIAS" in shown
        status, shown = cairn_on_a_terminal(*rollback, url=url, typed="y\n")
        assert (status, "production (step 3)" in shown) == (4, True)
        arguments = ("llama/steps/1", "--strand", "production", "--watch", "--json")
        last = cairn_here("rollback", *arguments, url=url).stdout.splitlines()[-1]
    assert json.loads(last)["result"]["superseded"] == [2, 3]
    assert [info.step for info in Run.open(store[0] / "llama").steps()] == [1]
