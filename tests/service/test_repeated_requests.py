"""A client that got no answer asks again: also when what it asked for is gone by then."""

import shutil

import pytest

from cairn import Run
from tests.service.jobs import save_llama, serving, watch
from tests.service.stores import trash
from tests.service.trail import audit_trail

RUN = "/v1/roots/default/runs/llama"
STEP = f"{RUN}/checkpoints/1"
STARTING = {
    f"{STEP}:verify": {},
    f"{STEP}:convert": {"max_shard_size": "13KB"},
    f"{STEP}:gather": {},  # the step decides on the items
    f"{STEP}:restore": {"mode": "fork", "run": "child"},
    f"{RUN}:verify": {"steps": "none"},
    f"{RUN}:gc": {"dry_run": True},
    f"{RUN}:applyRetention": {"policy": {"keep_last": 8}, "dry_run": False},
}
ADOPTING = "/v1/roots/default/runs:adopt"
"""Asked again in `test_adopt.py`: it is no run's, which may be gone."""
ROLLBACK = f"{STEP}:restore", {"mode": "rollback"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("saved") / "llama"
    save_llama(run, steps=(1, 2))
    return run


@pytest.fixture
def root(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "store" / "llama")
    return tmp_path / "store"


@pytest.fixture
def http(root, tmp_path):
    with serving(root, tmp_path / "data") as client:
        yield client


def ask(http, path, body, key):
    headers = {"Idempotency-Key": key, "If-Match": "*"}
    return http.post(path, json=body, headers=headers)


def started(http, path, body, key):
    answer = ask(http, path, body, key)
    assert answer.status_code == 202, answer.text
    return answer.json()


def test_every_route_that_takes_a_key_is_asked_here(http):
    taking = {
        path
        for path, methods in http.app.openapi()["paths"].items()
        for parameter in methods.get("post", {}).get("parameters", ())
        if parameter["name"] == "Idempotency-Key"
    }
    names = {"{root}": "default", "{run}": "llama", "{step}": "1"}
    for name, value in names.items():
        taking = {path.replace(name, value) for path in taking}
    assert taking == {*STARTING, ADOPTING}


def test_a_key_names_its_operation_also_once_the_run_is_gone(http, root):
    first = {path: started(http, path, body, path)["id"] for path, body in STARTING.items()}
    for operation in first.values():
        watch(http, operation)
    shutil.rmtree(root / "llama")
    for path, body in STARTING.items():
        again = started(http, path, body, path)
        assert (again["id"], again["state"]) == (first[path], "succeeded")
        assert ask(http, path, body, "another").status_code == 404
    entries = [entry for entry in audit_trail(http) if entry.outcome == "done"]
    operations = [entry.detail["operation"] for entry in entries]
    assert sorted(operations) == sorted([*first.values()] * 2), "each request has an entry"


def test_a_rollback_is_answered_again_once_its_step_is_gone(http, root):
    first = started(http, *ROLLBACK, "once")
    watch(http, first["id"])
    trash(Run.open(root / "llama"), 1)
    assert started(http, *ROLLBACK, "once")["id"] == first["id"]


def test_another_request_under_a_key_is_not_its_operation(http, root):
    operation = started(http, f"{STEP}:verify", {}, "once")
    watch(http, operation["id"])
    for path, body in STARTING.items():
        if path != f"{STEP}:verify":
            assert ask(http, path, body, "once").status_code == 422
    assert ask(http, f"{STEP.removesuffix('1')}2:verify", {}, "once").status_code == 422
    shutil.rmtree(root / "llama")
    assert ask(http, f"{RUN}:verify", {"steps": "all"}, "once").status_code == 404
