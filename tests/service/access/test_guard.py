"""A control plane with keys, asked over HTTP: who is answered, who is not, and by what."""

import asyncio
import time
from datetime import timedelta
from functools import partial

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError

from cairn import Settings, SettingsError, create_app
from cairn.service.access.authenticator import Authenticator
from cairn.service.access.guard import KeysGuard
from cairn.service.catalog.models import KeyRow
from tests.service.access.conftest import ADDRESS, ELSEWHERE, bearer
from tests.service.jobs import until
from tests.service.stores import make_run
from tests.service.trail import audit_trail

PROMOTE = "/v1/roots/default/runs/run/checkpoints/1:promote"


def promote(http, key, alias="production"):
    headers = {"If-None-Match": "*", **bearer(key)}
    return http.post(PROMOTE, json={"alias": alias}, headers=headers)


def problem(answer):
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].rpartition(":")[2]


@pytest.fixture(scope="module")
def never_told(tmp_path_factory):
    """A server that has no key, and is only asked for what it refuses."""
    folder = tmp_path_factory.mktemp("guarded")
    settings = Settings(
        root=str(folder / "store"),
        data_dir=folder / "data",
        scan_seconds=0,
        auth="keys",
        rate_limit=0,
    )
    with TestClient(
        create_app(settings, jobs=False), ADDRESS, client=ELSEWHERE, follow_redirects=False
    ) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    ["/v1/runs", "/v1/nowhere", "/nowhere", "/openapi.json", "/metrics", "/V1/runs", "//v1/runs",
     "/v1/../v1/runs", "/static/../v1/runs", "/healthz/", "/healthz/../v1/runs", "/static",
     "/%76%31/runs", "/v1%2Fruns", "/v1/runs?key=ck_aaaaaaaaaaaa_secret", "/%2e%2e/v1/runs"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE", "TRACE", "BREW"])
def test_whoever_shows_no_key_is_told_nothing(never_told, method, path):
    answer = never_told.request(method, path)
    if answer.status_code != 401:  # below /static/ there are files, and nothing else
        assert path.startswith("/static/")
        assert answer.status_code in (404, 405), answer.text
        return
    assert answer.headers["www-authenticate"] == 'Bearer realm="cairn"'
    if method != "HEAD":
        assert problem(answer) == (401, "unauthenticated")
        assert "CAIRN_KEY" in answer.json()["detail"]


def test_probes_and_style_sheets_need_no_key(http):
    assert http.get("/healthz").json()["status"] == "ok"
    assert http.get("/static/cairn.css").status_code == 200


def test_readiness_names_roots_and_causes_to_known_callers_only(http, keys):
    anybody, known = http.get("/readyz"), http.get("/readyz", headers=bearer(keys.make("ci")))
    assert (anybody.status_code, known.status_code) == (503, 503)
    assert "errors" not in anybody.json()
    assert "jobs" not in anybody.text
    assert known.json()["errors"][0]["field"] == "jobs"


def test_metrics_are_open_where_a_setting_says_so(settings):
    opened = Settings(**settings.model_dump() | {"metrics_open": True})
    with TestClient(create_app(opened, jobs=False), base_url=ADDRESS, client=ELSEWHERE) as http:
        assert http.get("/metrics").status_code != 401
        assert http.get("/v1/runs").status_code == 401


def test_key_is_answered_from_another_machine_under_any_host_name(http, keys, root):
    make_run(root / "run", [1])
    key = keys.make("ci")
    for host in ("cairn.example", "10.0.0.7:8321", "localhost"):
        answer = http.get("/v1/runs", headers={"Host": host, **bearer(key)})
        assert [run["name"] for run in answer.json()["runs"]] == ["run"]


@pytest.mark.parametrize(
    "given",
    ["{key}x", "{key} {key}", "{key},", "Bearer {key}", "", " ", "ck_", "null", "{upper}",
     "x" * 9000],
)  # fmt: skip
def test_anything_but_the_key_is_refused(http, keys, given):
    key = keys.make("ci")
    answer = http.get("/v1/runs", headers=bearer(given.format(key=key, upper=key.upper())))
    assert problem(answer) == (401, "unauthenticated")
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    assert key not in answer.text
    assert "ck_" not in answer.json()["detail"].replace("ck_<id>_<secret>", "")


@pytest.mark.parametrize("scheme", ["Basic", "Digest", "Key", ""])
def test_other_schemes_are_refused(http, keys, scheme):
    answer = http.get("/v1/runs", headers={"Authorization": f"{scheme} {keys.make('ci')}"})
    assert problem(answer) == (401, "unauthenticated")


def test_two_authorization_headers_are_refused_whichever_comes_first(http, keys):
    good, other = bearer(keys.make("ci"))["Authorization"], "Bearer x"
    for pair in ((good, other), (other, good), (good, good)):
        answer = http.get("/v1/runs", headers=[("Authorization", one) for one in pair])
        assert problem(answer) == (401, "unauthenticated")


def test_key_in_the_address_is_no_key(http, keys):
    key = keys.make("ci", "admin")
    for name in ("key", "access_token", "token"):
        assert http.get("/v1/runs", params={name: key}).status_code == 401


def test_audit_trail_and_store_have_the_name_of_the_key(http, keys, root):
    make_run(root / "run", [1])
    moved = promote(http, keys.make("release-bot", "operate"))
    assert moved.json()["by"] == "release-bot"
    (entry,) = audit_trail(http, bearer(keys.make("boss", "admin")))
    assert (entry.caller, entry.action, entry.outcome) == ("release-bot", "alias.promote", "done")


def test_key_that_is_revoked_elsewhere_is_refused_within_seconds(http, keys, monkeypatch):
    monkeypatch.setattr("cairn.service.access.ttl_cache.TTL_SECONDS", 0.2)
    key = keys.make("ci")
    assert http.get("/v1/runs", headers=bearer(key)).status_code == 200
    with keys.catalog() as catalog, catalog.write() as session:  # as another server would
        session.execute(text("UPDATE keys SET revoked = '2026-01-01 00:00:00'"))
    until(lambda: http.get("/v1/runs", headers=bearer(key)).status_code != 200)
    answer = http.get("/v1/runs", headers=bearer(key))
    assert problem(answer) == (401, "unauthenticated")
    assert "was revoked at" in answer.json()["detail"]


def test_key_that_expires_is_refused_at_once(http, keys):
    key = keys.make("ci", lifetime=timedelta(seconds=1))
    assert http.get("/v1/runs", headers=bearer(key)).status_code == 200
    time.sleep(1.05)
    answer = http.get("/v1/runs", headers=bearer(key))
    assert problem(answer) == (401, "unauthenticated")
    assert "expired at" in answer.json()["detail"]


def test_last_use_is_noted_once_a_minute(http, app, keys):
    key = keys.make("ci")
    noted = []
    for _ in range(3):
        assert http.get("/v1/runs", headers=bearer(key)).status_code == 200
        with app.state.plane.catalog.read() as session:
            noted.append(session.scalar(select(KeyRow.last_used)))
    assert noted[0] is not None
    assert len(set(noted)) == 1


def test_keys_are_made_listed_and_revoked_over_http(http, keys):
    manager = bearer(keys.make("boss", "admin"))
    made = http.post(
        "/v1/keys",
        json={"name": "ci", "scope": "operate", "roots": ["other"], "expires_seconds": 3600},
        headers=manager,
    )
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    details, key = made.json()["details"], made.json()["key"]
    assert (details["created_by"], details["counts"], details["roots"]) == ("boss", True, ["other"])
    assert http.get("/v1/roots", headers=bearer(key)).json()["roots"][0]["name"] == "other"
    listed = http.get("/v1/keys", headers=manager)
    assert [one["name"] for one in listed.json()["keys"]] == ["boss", "ci"]
    assert key.split("_", 2)[2] not in listed.text
    assert http.delete(f"/v1/keys/{details['id']}", headers=manager).status_code == 204
    assert http.delete("/v1/keys/" + "a" * 12, headers=manager).status_code == 404
    again = http.post("/v1/keys", json={"name": "boss"}, headers=manager)
    assert problem(again) == (409, "key-name-taken")
    odd = http.post("/v1/keys", json={"name": "loopback"}, headers=manager)
    assert problem(odd) == (409, "key-name-taken")
    odd = http.post("/v1/keys", json={"name": "x", "roots": ["default", "x"]}, headers=manager)
    assert problem(odd) == (404, "root-not-found")


def test_making_and_revoking_keys_is_audited_without_the_key(http, keys):
    manager = bearer(keys.make("boss", "admin"))
    made = http.post("/v1/keys", json={"name": "ci"}, headers=manager).json()
    http.delete(f"/v1/keys/{made['details']['id']}", headers=manager)
    entries = audit_trail(http, manager)
    assert [(entry.action, entry.caller, entry.outcome) for entry in entries] == [
        ("key.create", "boss", "done"),
        ("key.revoke", "boss", "done"),
    ]
    assert made["key"] not in str(entries)


def test_database_that_is_away_is_503_and_lets_nobody_in(http, app, keys, monkeypatch):
    key = keys.make("ci")

    def away(*_):
        raise OperationalError("SELECT", {"secret": key}, Exception("gone"))

    monkeypatch.setattr(app.state.authenticator._keys, "_lookup", away)
    for _ in range(2):
        answer = http.get("/v1/runs", headers=bearer(key))
        assert problem(answer) == (503, "database-unavailable")
    monkeypatch.undo()
    assert http.get("/v1/runs", headers=bearer(key)).status_code == 200


def test_server_that_others_can_reach_does_not_start_without_a_key(settings, keys):
    reachable = Settings(**settings.model_dump() | {"host": "0.0.0.0", "scan_seconds": 60})
    with (
        pytest.raises(SettingsError, match=r"CAIRN_HOST: '0.0.0.0' .* `cairn keys create"),
        TestClient(create_app(reachable, jobs=False)),
    ):
        pass
    keys.make("late", lifetime=timedelta(microseconds=1))
    with pytest.raises(SettingsError), TestClient(create_app(reachable, jobs=False)):
        pass
    keys.make("ci")
    with TestClient(create_app(reachable, jobs=False)) as http:
        assert http.get("/healthz").status_code == 200


def test_caller_of_one_root_is_told_of_no_other_by_metrics_and_readiness(http, keys, root):
    """Not even its name, which the series of an index and the parts that are asked have."""
    (root.parent / "other").rmdir()
    (root.parent / "other").write_text("no folder: this root is not ready")
    some, every = (
        bearer(keys.make(one, "admin", roots=roots))
        for one, roots in (("some", ["default"]), ("every", None))
    )
    refused = http.get("/metrics", headers=some)
    assert problem(refused) == (403, "forbidden")
    assert "in all roots" in refused.json()["detail"]
    assert http.get("/metrics", headers=every).status_code == 200
    told = {
        name: http.get("/readyz", headers=key) for name, key in (("some", some), ("every", every))
    }
    assert {name: answer.status_code for name, answer in told.items()} == {
        "some": 503,
        "every": 503,
    }
    assert "root other" in told["every"].text
    assert "other" not in told["some"].text


@pytest.fixture
def slow(settings, keys):
    """A guarded application that answers once it may; who asks of it, and what they were told."""

    class Slow:
        def __init__(self, catalog):
            self.over, self.inside = asyncio.Event(), 0
            self.authenticator = Authenticator(catalog)
            self.state = self  # as of an application
            self.guard = KeysGuard(self.answer, settings)

        async def answer(self, scope, receive, send):
            self.inside += 1
            await self.over.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async def ask(self, key):
            headers = [(b"authorization", f"Bearer {key}".encode())]
            scope = {"type": "http", "method": "GET", "path": "/v1/x", "query_string": b""}
            statuses = []

            async def send(message):
                statuses.append(message.get("status"))

            known = {"headers": headers, "client": ELSEWHERE, "app": self}
            await self.guard(scope | known, None, send)
            return statuses[0]

    with keys.catalog() as catalog:
        yield partial(Slow, catalog)


def test_caller_has_so_many_requests_under_way_and_others_go_on(slow, keys, monkeypatch):
    """Event streams and downloads last: a thousand of them would be all of a server's."""
    monkeypatch.setattr("cairn.service.access.guard.UNDER_WAY", 3)
    busy, calm = keys.make("busy"), keys.make("calm")

    async def scenario():
        service = slow()
        first = [asyncio.create_task(service.ask(busy)) for _ in range(3)]
        while service.inside < 3:
            await asyncio.sleep(0.01)
        assert await service.ask(busy) == 429
        other = asyncio.create_task(service.ask(calm))
        while service.inside == 3:
            await asyncio.sleep(0.01)
        service.over.set()
        assert set(await asyncio.gather(*first, other)) == {200}
        assert await service.ask(busy) == 200
        assert not service.guard._under_way

    asyncio.run(scenario())
