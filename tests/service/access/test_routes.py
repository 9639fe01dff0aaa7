"""Every route of the API, asked of a server with keys by those who may not have that done."""

from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient

from cairn.service.access import list_keys, revoke_key
from cairn.service.app import create_app
from cairn.service.schemas import Scope
from cairn.service.settings import Settings
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.test_openapi import INVALID, UNKNOWN, ask, check_declared, routes
from tests.service.test_permissions import ROUTES, permissions

NEEDED = {route.name: permissions(route)[0] for route in ROUTES}
"""What a route asks of its caller, by name."""

API = [one for one in routes() if one.values[1].startswith("/v1/")]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of two roots, and keys: of each scope, of one root, and such as count no more."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("store", "other"):
        (folder / name).mkdir()
    settings = Settings(
        root=str(folder / "store"),
        roots={"nowhere": str(folder / "other")},
        data_dir=folder / "data",
        auth="keys",
        rate_limit=0,
    )
    settings.prepare()
    keys = Keys(settings.database_url)
    made = {scope.value: keys.make(scope.value, scope.value) for scope in Scope}
    made["elsewhere"] = keys.make("elsewhere", "admin", roots=["default"])
    made["expired"] = keys.make("expired", "admin", lifetime=timedelta(0))
    made["revoked"] = keys.make("revoked", "admin")
    with keys.catalog() as catalog:
        for row in list_keys(catalog):
            if row.name == "revoked":
                revoke_key(catalog, row.id, now=datetime.now(UTC))
    app = create_app(settings)
    with TestClient(app, base_url=ADDRESS, client=ELSEWHERE) as http:
        yield http, {name: bearer(key) for name, key in made.items()}, app.openapi()


def asked_by(http, method, path, headers):
    http.headers.pop("Authorization", None)
    http.headers.update(headers)
    # Malformed and unknown things too: who may not ask is told nothing of them.
    return ask(http, method, path, UNKNOWN)


@pytest.mark.parametrize(("method", "path"), API)
@pytest.mark.parametrize("key", [None, "expired", "revoked", "wrong"])
def test_route_answers_nobody_without_a_key_that_counts(served, method, path, key):
    http, keys, document = served
    unknown = bearer("ck_" + "a" * 12 + "_" + "b" * 43)
    answer = asked_by(http, method, path, {} if key is None else keys.get(key, unknown))
    held_back = key is not None and answer.status_code == 429  # so many from one address
    assert answer.status_code == 401 or held_back, answer.text
    check_declared(document, method, path, answer)


@pytest.mark.parametrize(("method", "path"), API)
def test_route_refuses_callers_of_less_scope_than_it_needs(served, method, path):
    http, keys, document = served
    name = document["paths"][path][method]["operationId"]
    for scope in Scope:
        answer = asked_by(http, method, path, keys[scope.value])
        if scope.includes(NEEDED[name].scope):
            assert answer.status_code not in (401, 403), answer.text
        else:
            assert answer.status_code == 403, answer.text
            assert f"may {NEEDED[name].scope.value}" in answer.json()["detail"]
            check_declared(document, method, path, answer)


@pytest.mark.parametrize(("method", "path"), API)
def test_route_refuses_who_may_not_before_it_reads_what_they_send(served, method, path):
    """A limited administrator too: what is wrong with a body, a header or a query is not said."""
    http, keys, document = served
    needed = NEEDED[document["paths"][path][method]["operationId"]]
    refused = [scope.value for scope in Scope if not scope.includes(needed.scope)]
    if needed.everywhere or "{root}" in path:
        refused.append("elsewhere")
    for name in refused:
        http.headers.pop("Authorization", None)
        for values, query, body in (
            (UNKNOWN, "", b"{"),
            (UNKNOWN, "", b'{"odd": 1}'),
            (INVALID, "?odd=%00&page_size=x", b"[]"),
        ):
            url = path
            for parameter, value in values.items():
                url = url.replace("{" + parameter + "}", value)
            headers = {**keys[name], "If-Match": "x", "Content-Type": "application/json"}
            answer = http.request(method, url + query, content=body, headers=headers)
            assert answer.status_code == 403, (name, body[:20], answer.text)


@pytest.mark.parametrize(("method", "path"), API)
def test_route_of_a_root_refuses_callers_of_other_roots(served, method, path):
    http, keys, document = served
    answer = asked_by(http, method, path, keys["elsewhere"])
    needed = NEEDED[document["paths"][path][method]["operationId"]]
    if "{root}" in path or needed.everywhere:
        assert answer.status_code == 403, answer.text
        check_declared(document, method, path, answer)
    else:
        assert answer.status_code != 401


def test_routes_without_a_root_show_callers_of_one_root_nothing_of_others(served):
    """By their bodies: those that list, and those of a thing that names its root."""
    http, keys, _ = served
    http.headers.update(keys["elsewhere"])
    assert [one["name"] for one in http.get("/v1/roots").json()["roots"]] == ["default"]
    assert http.get("/v1/runs").json()["runs"] == []
    for path in ("artifacts/nowhere~nothing~7~1~convert-0123456789ab",):
        assert http.get(f"/v1/{path}").status_code in (403, 404)


def test_who_administers_one_root_takes_no_worker_over(served):
    """What a worker has left may be of any root."""
    http, keys, _ = served
    for name, status in (("elsewhere", 403), ("admin", 404)):
        answer = http.post("/v1/workers/nobody:takeOver", headers=keys[name])
        assert answer.status_code == status, answer.text
    answer = http.post("/v1/workers/nobody:takeOver", headers=keys["elsewhere"])
    assert "in all roots" in answer.json()["detail"]


def test_readiness_has_the_roots_that_its_caller_may_use(served):
    http, keys, _ = served
    told = {name: http.get("/readyz", headers=keys[name]) for name in ("elsewhere", "admin")}
    assert {answer.status_code for answer in told.values()} == {200}
    roots = {
        name: {part.split()[-1] for part in answer.json()["checks"] if " " in part}
        for name, answer in told.items()
    }
    listed = http.get("/v1/roots", headers=keys["admin"]).json()["roots"]
    every = {one["name"] for one in listed}  # with one that was added above, maybe
    assert every - {"more"} == {"default", "nowhere"}
    assert roots == {"elsewhere": {"default"}, "admin": every}
    assert "nowhere" not in told["elsewhere"].text
