"""What is done to runs again and again, as the settings say."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cairn import Client, Run, Settings, SettingsError, StoreUnavailableError, create_app, parse_uri
from cairn.service.actions import schedules
from cairn.service.actions.schedules import Scheduler
from cairn.service.jobs.records import operation_key
from cairn.service.settings import load_settings
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import save_llama, watch
from tests.service.planes import running_plane
from tests.service.stores import make_run
from tests.service.trail import audit_trail

NEVER = "0 0 29 2 *"
"""Whatever the server itself does of it comes years later."""

THREE = datetime(2028, 2, 29, tzinfo=UTC)
VERIFY = {"kind": "schedule", "name": "nightly", "cron": NEVER, "action": "verify", "run": "llama*"}
RETAIN = {"kind": "retention", "name": "weekly", "cron": NEVER, "keep_last": 1}
COLLECT = {
    "kind": "schedule",
    "name": "garbage",
    "cron": NEVER,
    "action": "collect_garbage",
    "run": "llama",
}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scheduled")
    save_llama(folder / "store" / "llama", (1, 2, 3))
    make_run(folder / "store" / "other", [3, 6])
    settings = Settings(
        root=str(folder / "store"),
        data_dir=folder / "data",
        scan_seconds=0,
        policies=(VERIFY, RETAIN, COLLECT),
    )
    with TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as client:
        client.get("/v1/runs", params={"refresh": True})
        yield client


def scheduler(http, name, *, at=THREE):
    plane = http.app.state.plane
    only = tuple(one for one in plane.settings.policies if one.name == name)
    settings = plane.settings.model_copy(update={"policies": only})
    return Scheduler(
        type(plane)(settings, plane.roots, plane.index, plane.engine), clock=lambda: at
    )


def operations(http, kind):
    listed = http.get("/v1/operations", params={"page_size": 1000}).json()["operations"]
    return [watch(http, one["id"]) for one in listed if one["kind"] == kind]


def test_what_is_due_is_started_once_for_each_run_that_it_is_for(http):
    looks = [scheduler(http, "nightly", at=THREE + timedelta(minutes=n)) for n in range(3)]
    assert [one.look() for one in looks for _ in range(2)] == [1, 0, 0, 0, 0, 0]
    (operation,) = operations(http, "verify")
    assert (operation["state"], operation["request"]["run"]) == ("succeeded", "llama")
    assert [one["step"] for one in operation["result"]["steps"]] == [3]
    later = scheduler(http, "nightly", at=THREE.replace(year=2032))
    assert later.look() == 1
    assert len(operations(http, "verify")) == 2


def test_a_policy_is_applied_to_every_run_and_garbage_collected(http):
    assert scheduler(http, "weekly").look() == 2
    for operation in operations(http, "retention"):
        assert operation["state"] == "succeeded", operation
    store = http.app.state.plane.roots["default"]
    assert [info.step for info in Run.open(store / "llama").steps()] == [3]
    assert [info.step for info in Run.open(store / "other").steps()] == [6]
    assert scheduler(http, "garbage").look() == 1
    (collected,) = operations(http, "gc")
    assert collected["request"]["run"] == "llama"


def test_the_audit_trail_names_the_schedule(http):
    scheduler(http, "garbage", at=THREE.replace(year=2036)).look()
    entries = {(entry.caller, entry.action) for entry in audit_trail(http)}
    assert ("schedule:garbage", "run.gc") in entries


def test_what_was_due_long_ago_waits_until_it_is_due_again(http):
    assert scheduler(http, "nightly", at=THREE.replace(year=2040) + schedules.LATE * 2).look() == 0
    assert scheduler(http, "nightly", at=THREE.replace(year=2040) + schedules.LATE / 2).look() == 1


def test_a_run_that_can_not_be_had_keeps_no_other_from_its_turn(http, caplog):
    store = http.app.state.plane.roots["default"]
    make_run(store / "gone", [3])
    http.get("/v1/runs", params={"refresh": True})
    Path((store / "gone" / "run.json").local_path).unlink()
    assert scheduler(http, "weekly", at=THREE.replace(year=2044)).look() == 2
    assert "retention:weekly: default/gone: not started" in caplog.text


def test_a_root_that_is_away_keeps_no_other_from_its_turn_and_is_tried_again(
    http, tmp_path, monkeypatch
):
    roots = {name: parse_uri(str(tmp_path / name)) for name in ("a", "b")}
    for folder in roots.values():
        make_run(folder / "run", [3])
    settings = Settings(policies=({**COLLECT, "root": "a", "run": "*"}, {**RETAIN, "name": "all"}))
    plane = http.app.state.plane
    one = Scheduler(type(plane)(settings, roots, plane.index, plane.engine), clock=lambda: THREE)
    look = plane.index.refresh_root

    def away(root, uri):
        if root == "a":
            raise StoreUnavailableError("no answer", path=uri)
        return look(root, uri)

    with monkeypatch.context() as silent:
        silent.setattr(plane.index, "refresh_root", away)
        assert [one.look(), one.look()] == [1, 0]
    assert [one.look(), one.look()] == [2, 0]


def test_no_idempotency_key_of_a_client_is_one_of_a_schedule(http):
    """Else who may verify one run could have the schedule of another pass it by."""
    due = THREE.replace(year=2048)
    moment = f"{due:%Y-%m-%dT%H:%MZ}"
    names = ("nightly", "schedule:nightly")
    keys = [
        f"{moment}/llama",
        f"default/{moment}/llama",
        f"schedule/nightly/{moment}/default/llama",
    ]
    keys += [json.dumps([name, "default", f"{moment}/llama"]) for name in names]
    sent = [
        http.post(
            "/v1/roots/default/runs/other:verify",
            json={"steps": "none"},
            headers={"Idempotency-Key": key},
        )
        for key in keys
    ]
    assert [answer.status_code for answer in sent] == [202] * len(keys)
    assert scheduler(http, "nightly", at=due).look() == 1


def test_a_schedule_whose_work_another_operation_stands_for_says_so(http, caplog):
    due = THREE.replace(year=2052)
    plane = http.app.state.plane
    key = operation_key("schedule:nightly", "default", f"{due:%Y-%m-%dT%H:%MZ}/llama")
    request = {"root": "default", "run": "other", "steps": "none"}
    started = plane.jobs.start("verify", request, idempotency_key=key)
    look = scheduler(http, "nightly", at=due)
    assert [look.look(), look.look()] == [0, 0]
    told = [line for line in caplog.messages if "schedule:nightly: default/llama: not sta" in line]
    assert len(told) == 1
    assert f"belongs to the request of operation {started.id}" in told[0]
    refused = [entry for entry in audit_trail(http) if entry.outcome == "refused"]
    assert [(entry.caller, entry.action, entry.run) for entry in refused] == [
        ("schedule:nightly", "run.verify", "llama")
    ]


def test_schedules_are_listed_with_when_they_are_due(http):
    found = http.get("/v1/policies").json()["policies"]
    assert [one["name"] for one in found] == ["weekly", "garbage", "nightly"]
    for one in found:
        assert (one["source"], one["policy"]["cron"]) == ("environment", NEVER)
        following = datetime.fromisoformat(one["next_due"])
        assert datetime.now(UTC) < following
        assert (following.month, following.day) == (2, 29)


def test_a_server_starts_what_is_due_by_itself(tmp_path):
    make_run(tmp_path / "store" / "run", [3])
    (tmp_path / "data").mkdir()
    every_minute = VERIFY | {"cron": "* * * * *", "run": "*", "steps": "none"}
    environment = {"CAIRN_POLICIES": json.dumps([every_minute])}
    with (
        running_plane(tmp_path / "store", tmp_path / "data", environment) as (url, _),
        Client(url) as client,
    ):
        deadline = time.monotonic() + 60
        while not (started := list(client.operations())):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.wait(started[0].id).result["run"] == "run"


@pytest.mark.parametrize(
    "change",
    [
        {"cron": "* * * *"},
        {"cron": "* * * * * *"},
        {"cron": "@daily"},
        {"cron": "61 * * * *"},
        {"cron": "0 3 31 2 *"},
        {"cron": "0 3 31 apr,jun *"},
        {"cron": "R 3 * * *"},
        {"cron": "0 3 * r(1-6)/2 *"},
        {"action": "delete"},
        {"keep_last": 1},
        {"kind": "retention"},
        {"action": "collect_garbage", "steps": "all"},
        {"name": ""},
        {"every": 5},
    ],
)
def test_schedules_that_can_not_be_are_refused_at_the_start(monkeypatch, change):
    monkeypatch.setenv("CAIRN_POLICIES", json.dumps([VERIFY | change]))
    with pytest.raises(SettingsError, match="CAIRN_POLICIES"):
        load_settings()


def test_two_schedules_of_one_name_are_refused(monkeypatch):
    monkeypatch.setenv("CAIRN_POLICIES", json.dumps([VERIFY, VERIFY]))
    with pytest.raises(SettingsError, match="names that differ"):
        load_settings()
