"""Callers of some roots learn nothing of what the settings do to the others."""

import pytest
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from cairn.service.catalog.events.automations import advance, positions
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.stores import make_run

SECRET = "team-b-secret"
SCHEDULE = {"kind": "schedule", "name": "s", "cron": "0 0 29 2 *", "action": "verify"}
AUTOMATION = {"kind": "automation", "name": "a", "alias": "production", "action": "verify"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two roots, an operation in the second, and keys: for all, the first, and one that is gone."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("store", SECRET, "gone"):
        (folder / name).mkdir()
    make_run(folder / SECRET / "run", [1], labels={"concealed": "owner"})
    settings = Settings(
        root=str(folder / "store"),
        roots={SECRET: str(folder / SECRET)},
        data_dir=folder / "data",
        auth="keys",
        rate_limit=0,
        worker=False,
        policies=[
            SCHEDULE,
            SCHEDULE | {"name": "ours", "root": "def*"},
            SCHEDULE | {"name": SECRET, "root": "team-b-*"},
            AUTOMATION,
            AUTOMATION | {"name": "ours", "root": "default"},
            AUTOMATION | {"name": SECRET, "root": SECRET},
        ],
    )
    settings.prepare()
    keys = Keys(settings.database_url)
    made = {
        "all": keys.make("all", "admin"),
        "ours": keys.make("ours", "admin", roots=["default"]),
        "gone": keys.make("gone", "admin", roots=["gone"]),
    }
    with TestClient(create_app(settings), base_url=ADDRESS, client=ELSEWHERE) as http:
        callers = {name: bearer(key) for name, key in made.items()}
        http.post(
            "/v1/roots", json={"name": "gone", "uri": str(folder / "gone")}, headers=callers["all"]
        )
        assert http.delete("/v1/roots/gone", headers=callers["all"]).status_code == 204
        answer = http.post(
            f"/v1/roots/{SECRET}/runs/run:verify",
            json={},
            headers=callers["all"],
        )
        assert answer.status_code == 202
        yield http, callers, answer.json()["id"]


def test_schedules_and_automations_are_listed_by_root(served):
    http, callers, _ = served
    for kind in ("schedule", "automation"):
        address = f"/v1/policies?kind={kind}"
        names = {
            caller: [one["name"] for one in http.get(address, headers=key).json()["policies"]]
            for caller, key in callers.items()
        }
        every = sorted([kind[0], "ours", SECRET])
        assert names == {"all": every, "ours": sorted([kind[0], "ours"]), "gone": []}
        for caller in ("ours", "gone"):
            assert SECRET not in http.get("/policies", headers=callers[caller]).text


def test_what_an_automation_started_for_another_root_is_not_told(served):
    http, callers, operation = served
    catalog = http.app.state.plane.catalog
    for name, at in positions(catalog, ["a", "ours"]).items():
        advance(catalog, name, before=at, after=at, operation=operation, problem=SECRET)
    for caller, told in (("all", {"a", "ours"}), ("ours", {"ours"})):
        address = "/v1/policies?kind=automation"
        listed = http.get(address, headers=callers[caller]).json()["policies"]
        ran = {one["name"]: one["last"] for one in listed if one["last"]}
        assert {name for name, last in ran.items() if last["problem"] or last["operation"]} == told


def test_runs_of_other_roots_are_neither_compared_nor_completed(served):
    http, callers, _ = served
    address = f"/compare/runs?run={SECRET}/run"
    for caller, is_told in (("all", True), ("ours", False), ("gone", False)):
        for path in (address, address.replace("?", "/meta?")):
            assert http.get(path, headers=callers[caller]).status_code == 200
        compared = http.get(address + "&equal=true", headers=callers[caller]).text
        assert ("concealed" in compared) is is_told
        assert (f"Not found: {SECRET}/run" in compared) is not is_told
        completed = http.get("/runs/completions?q=labels.", headers=callers[caller]).json()
        assert completed["options"] == ["labels.concealed"] * is_told
