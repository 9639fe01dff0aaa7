"""Callers of some roots learn nothing of the others: not that a thing is there, nor its name."""

import json

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from cairn.service.app import ROUTERS, create_app
from cairn.service.catalog import advance, positions
from cairn.service.dashboard import ROUTERS as PAGES
from cairn.service.jobs import operation_id, operation_key
from cairn.service.settings import Settings
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.stores import make_run
from tests.service.test_openapi import UNKNOWN

SECRET = "team-b-secret"
KEY = "nightly"
SCHEDULE = {"name": "s", "cron": "0 0 29 2 *", "action": "verify"}
AUTOMATION = {"name": "a", "alias": "production", "action": "verify"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two roots, an operation in the second, and keys: for all, the first, and one that is gone."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("store", SECRET, "gone"):
        (folder / name).mkdir()
    make_run(folder / SECRET / "run", [1])
    settings = Settings(
        root=str(folder / "store"),
        roots={SECRET: str(folder / SECRET)},
        data_dir=folder / "data",
        auth="keys",
        rate_limit=0,
        worker=False,
        schedules=[
            SCHEDULE,
            SCHEDULE | {"name": "ours", "root": "def*"},
            SCHEDULE | {"name": SECRET, "root": "team-b-*"},
        ],
        automations=[
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
            headers={**callers["all"], "Idempotency-Key": KEY},
        )
        assert answer.status_code == 202
        yield http, callers, answer.json()["id"]


def answers(http, headers, path, method, values):
    for name, value in values.items():
        path = path.replace(name, value)
    answer = http.request(method, path, headers=headers)
    problem = answer.json() if answer.content else {}
    problem.pop("request_id", None)
    return answer.status_code, json.dumps(problem).replace(next(iter(values.values())), "X")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/operations/OPERATION"),
        ("GET", "/v1/operations/OPERATION/events"),
        ("POST", "/v1/operations/OPERATION:cancel"),
        ("POST", "/v1/operations/OPERATION:resume"),
        ("GET", "/operations/OPERATION"),
        ("GET", "/operations/OPERATION/card"),
        ("POST", "/operations/OPERATION/cancel"),
        ("POST", "/operations/OPERATION/resume"),
        ("GET", "/v1/artifacts/ROOT~run~1~1~convert-0123456789ab"),
        ("GET", "/v1/artifacts/ROOT~run~1~1~convert-0123456789ab/files/config.json"),
        ("HEAD", "/v1/artifacts/ROOT~run~1~1~convert-0123456789ab/files/config.json"),
        ("GET", "/artifacts/ROOT~run~1~1~convert-0123456789ab"),
    ],
)
def test_what_lies_in_another_root_answers_as_what_there_is_not(served, method, path):
    """An operation's id can be computed by who guesses the caller's name, the root and the key."""
    http, callers, operation = served
    assert operation == operation_id(operation_key("all", SECRET, KEY))
    name = "OPERATION" if "OPERATION" in path else "ROOT"
    there, nothing = (operation, UNKNOWN["operation"]), (SECRET, "nowhere")
    found, missing = there if name == "OPERATION" else nothing
    for caller in ("ours", "gone"):
        answer = answers(http, callers[caller], path, method, {name: found})
        assert answer == answers(http, callers[caller], path, method, {name: missing})
        assert answer[0] == 404


def test_schedules_and_automations_are_listed_by_root(served):
    http, callers, _ = served
    for kind in ("schedules", "automations"):
        names = {
            caller: [one["name"] for one in http.get(f"/v1/{kind}", headers=key).json()[kind]]
            for caller, key in callers.items()
        }
        every = sorted([kind[0], "ours", SECRET])
        assert names == {"all": every, "ours": sorted([kind[0], "ours"]), "gone": []}
        for caller in ("ours", "gone"):
            assert SECRET not in http.get("/health", headers=callers[caller]).text


def test_what_an_automation_started_for_another_root_is_not_told(served):
    http, callers, operation = served
    catalog = http.app.state.plane.catalog
    for name, at in positions(catalog, ["a", "ours"]).items():
        advance(catalog, name, before=at, after=at, operation=operation, problem=SECRET)
    for caller, told in (("all", {"a", "ours"}), ("ours", {"ours"})):
        listed = http.get("/v1/automations", headers=callers[caller]).json()["automations"]
        assert {one["name"] for one in listed if one["problem"] or one["operation"]} == told


READS = [
    pytest.param(route.path, prefix, id=route.name)
    for routers, prefix in ((ROUTERS, "/v1"), (PAGES, ""))
    for router in routers
    for route in router.routes
    if isinstance(route, APIRoute) and "GET" in route.methods
]


@pytest.mark.parametrize(("path", "prefix"), READS)
def test_key_whose_root_was_removed_is_shown_an_empty_service(served, path, prefix):
    http, callers, _ = served
    values = UNKNOWN | {"root": "gone", "artifact": UNKNOWN["artifact"].replace("default", "gone")}
    url = prefix + path.replace(":name}", "}").replace(":path}", "}")
    for name, value in values.items():
        url = url.replace("{" + name + "}", value)
    question = "other=1" if "/compare" in path or ":diff" in path else ""
    if "/tensor" in path and not prefix:
        question = "item=model&path=a"
    answer = http.get(f"{url}?{question}", headers=callers["gone"] | {"Accept": "text/html"})
    everywhere = answer.status_code == 403 and "in all roots" in answer.text
    assert everywhere or answer.status_code == (404 if "{" in path else 200), answer.text
    for name in ("default", SECRET, str(http.app.state.plane.roots["default"])):
        assert name not in answer.text
