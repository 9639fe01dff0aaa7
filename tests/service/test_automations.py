"""What is done once an alias has moved, as the settings say: each move once."""

import json
import shutil
import time

import pytest
from fastapi.testclient import TestClient

from cairn import (
    Client,
    Damage,
    Run,
    Settings,
    SettingsError,
    StoreUnavailableError,
    create_app,
    promote_step,
)
from cairn.service.access.callers import Caller, Scope
from cairn.service.actions import automations
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.policies import list_policies
from cairn.service.settings import load_settings
from cairn.storage.runs.annotate import note_verified
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import save_llama, watch
from tests.service.planes import running_plane
from tests.service.stores import add_steps, make_run

RUNS = "/v1/roots/default/runs"
EXPORT = {"kind": "automation", "name": "export", "alias": "production", "action": "convert"}
VERIFY = {
    "kind": "automation",
    "name": "verify",
    "alias": "prod*",
    "action": "verify",
    "run": "llama*",
}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """Nothing follows by itself: the tests do."""
    folder = tmp_path_factory.mktemp("automated")
    for name in ("llama", "llama-2", "llama-3"):
        save_llama(folder / "store" / name, (1, 2))
    make_run(folder / "store" / "other", [3, 6])
    settings = Settings(root=str(folder / "store"), data_dir=folder / "data", scan_seconds=0)
    with TestClient(create_app(settings), base_url=BASE_URL, client=PEER) as client:
        yield client


@pytest.fixture
def follow(http, request):
    """Follows the moves, with automations of this test alone."""

    def plane_with(wanted):
        plane = http.app.state.plane
        named = [{**one, "name": f"{one['name']}-{request.node.name[:60]}"} for one in wanted]
        settings = Settings(root=plane.settings.root, policies=named)
        return ControlPlane(settings, plane.roots, plane.index, plane.engine)

    def started(*wanted):
        return automations.follow_moves(plane_with(wanted))

    ana = Caller("ana", Scope.READ)
    started.told = lambda *wanted: list_policies(plane_with(wanted), ana).policies
    return started


def promote(http, run, step, alias="production"):
    path = f"{RUNS}/{run}/aliases/{alias}"
    seen = http.get(path)
    headers = {"If-None-Match": "*"}
    if seen.status_code == 200:
        headers = {"If-Match": seen.headers["ETag"]}
    answer = http.post(
        f"{RUNS}/{run}/checkpoints/{step}:promote", json={"alias": alias}, headers=headers
    )
    assert answer.status_code == 200, answer.text


def operations(http, *, since=()):
    listed = http.get("/v1/operations", params={"page_size": 1000}).json()["operations"]
    return [watch(http, one["id"]) for one in listed if one["id"] not in since]


def ids(http):
    return {one["id"] for one in operations(http)}


def test_each_move_is_acted_on_once(http, follow):
    assert follow(EXPORT, VERIFY) == 0
    before = ids(http)
    promote(http, "llama", 1)
    promote(http, "llama", 2)
    promote(http, "llama", 2, alias="staging")
    assert [follow(EXPORT, VERIFY) for _ in range(3)] == [4, 0, 0]
    found = operations(http, since=before)
    assert {one["state"] for one in found} == {"succeeded"}
    told = sorted((one["kind"], one["request"]["step"]) for one in found)
    assert told == [("convert", 1), ("convert", 2), ("verify", 1), ("verify", 2)]


def test_who_dies_after_the_start_starts_nothing_twice(http, follow, monkeypatch):
    follow(EXPORT)
    before = ids(http)
    promote(http, "llama-2", 1)

    def die(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(automations, "advance", die)
        with pytest.raises(KeyboardInterrupt):
            follow(EXPORT)
    follow(EXPORT)
    (operation,) = operations(http, since=before)
    assert (operation["kind"], operation["request"]["run"]) == ("convert", "llama-2")


def test_what_can_not_be_done_is_noted_and_keeps_nothing_else_from_being_done(http, follow):
    follow(EXPORT)
    before = ids(http)
    store = http.app.state.plane.roots["default"]
    make_run(store / "gone", [3])
    promote(http, "gone", 3)
    promote(http, "llama-3", 1)
    shutil.rmtree((store / "gone").local_path)
    assert follow(EXPORT) == 1
    (operation,) = operations(http, since=before)
    assert operation["request"]["run"] == "llama-3"


def test_why_nothing_could_be_started_is_told(http, follow):
    follow(VERIFY)
    store = http.app.state.plane.roots["default"]
    make_run(store / "llama-gone", [3])
    promote(http, "llama-gone", 3)
    shutil.rmtree((store / "llama-gone").local_path)
    assert follow(VERIFY) == 0
    (told,) = follow.told(VERIFY)
    assert (told.last.operation, "llama-gone" in told.last.problem) == (None, True)


def test_a_step_that_was_found_damaged_since_is_not_exported_and_that_is_told(http, follow):
    follow(EXPORT)
    run = Run(http.app.state.plane.roots["default"] / "llama-2")
    promote(http, "llama-2", 2)
    note_verified(run, run.step(2), damage=Damage(at="2026-01-02T03:04:05Z"))
    assert follow(EXPORT) == 0
    (told,) = follow.told(EXPORT)
    assert (told.last.operation, "the step is damaged" in told.last.problem) == (None, True)
    note_verified(run, run.step(2))


def test_a_root_that_is_away_holds_up_its_own_moves_alone(http, follow, tmp_path, monkeypatch):
    plane = http.app.state.plane
    save_llama(tmp_path / "far" / "llama-far", (1,))
    made = http.post("/v1/roots", json={"name": "far", "uri": str(tmp_path / "far")})
    assert made.status_code == 201, made.text
    follow(EXPORT, VERIFY)
    before = ids(http)
    promote_step(Run.open(plane.place("far", "llama-far")), 1, "production", expect=None, by="me")
    assert http.get("/v1/roots/far/runs/llama-far", params={"refresh": True}).status_code == 200
    promote(http, "llama", 1, alias="prod-late")
    look = ControlPlane.run

    def away(self, root, run):
        if root == "far":
            raise StoreUnavailableError("no answer", path=self.root(root))
        return look(self, root, run)

    with monkeypatch.context() as silent:
        silent.setattr(ControlPlane, "run", away)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                follow(EXPORT, VERIFY)
        started = [(one["kind"], one["request"]["run"]) for one in operations(http, since=before)]
        assert started == [("verify", "llama")]
    assert follow(EXPORT, VERIFY) == 3  # that one is passed by
    told = sorted((one["kind"], one["request"]["run"]) for one in operations(http, since=before))
    assert told == [("convert", "llama-far"), ("verify", "llama"), ("verify", "llama-far")]


def test_a_step_that_was_saved_anew_since_the_move_is_left_alone(http, follow):
    follow(VERIFY)
    before = ids(http)
    run = make_run(http.app.state.plane.roots["default"] / "llama-anew", [3, 6])
    promote(http, "llama-anew", 6)
    add_steps(run, [6], base_step=3)
    assert follow(VERIFY) == 0
    assert ids(http) == before
    (told,) = follow.told(VERIFY)
    assert "expected attempt 1" in told.last.problem


def test_a_move_around_the_service_counts(http, follow):
    follow(VERIFY)
    before = ids(http)
    run = Run.open(http.app.state.plane.place("default", "llama"))
    promote_step(run, 1, "prod-eu", expect=None, by="somebody")
    http.get(f"{RUNS}/llama", params={"refresh": True})
    assert follow(VERIFY) == 1
    (operation,) = operations(http, since=before)
    assert (operation["kind"], operation["request"]["step"]) == ("verify", 1)


def test_what_moved_before_there_was_an_automation_is_left_alone(http, follow):
    promote(http, "llama-2", 2, alias="production-2")
    assert follow({**VERIFY, "alias": "production-2"}) == 0


def test_automations_are_listed_with_what_they_started(tmp_path):
    store, data = tmp_path / "store", tmp_path / "data"
    save_llama(store / "llama", (1, 2))
    data.mkdir()
    environment = {"CAIRN_POLICIES": json.dumps([EXPORT | {"convert": {"dtype": "bfloat16"}}])}
    with running_plane(store, data, environment) as (url, _), Client(url) as client:
        (told,) = listed(client)
        assert (told["policy"]["action"], told["source"]) == ("convert", "environment")
        client.promote("llama", 2, "production", expect=None)
        operation = client.wait(until(lambda: (listed(client)[0]["last"] or {}).get("operation")))
        assert operation.request["options"]["dtype"] == "bfloat16"


def listed(client):
    return client._http.get("/v1/policies").json()["policies"]


def until(look):
    deadline = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_server_that_is_killed_acts_on_each_move_once(tmp_path):
    store, data = tmp_path / "store", tmp_path / "data"
    save_llama(store / "llama", (1, 2))
    data.mkdir()
    environment = {"CAIRN_POLICIES": json.dumps([VERIFY])}
    sequence = None
    for number, pause in enumerate((0.0, 0.6, 1.2)):
        with running_plane(store, data, environment) as (url, process), Client(url) as client:
            until(lambda client=client: listed(client)[0]["last"] is not None)
            step = 1 + number % 2
            sequence = client.promote("llama", step, "production", expect=sequence).sequence
            time.sleep(pause)
            process.kill()
    with running_plane(store, data, environment) as (url, _), Client(url) as client:
        until(lambda: len(list(client.operations())) == 3)
        found = [client.wait(one.id) for one in client.operations()]
    assert sorted(one.request["step"] for one in found) == [1, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"action": "promote"},
        {"alias": ""},
        {"action": "verify", "convert": {}},
        {"convert": {"dtype": "int8"}},
        {"on": "moved"},
        {"name": "no/slash"},
    ],
)
def test_automations_that_can_not_be_are_refused_at_the_start(monkeypatch, change):
    monkeypatch.setenv("CAIRN_POLICIES", json.dumps([EXPORT | change]))
    with pytest.raises(SettingsError, match="CAIRN_POLICIES"):
        load_settings()


def test_two_automations_of_one_name_are_refused(monkeypatch):
    monkeypatch.setenv("CAIRN_POLICIES", json.dumps([EXPORT, EXPORT]))
    with pytest.raises(SettingsError, match="names that differ"):
        load_settings()
