"""The table of routes and statuses: whatever an operation declares, it is seen to answer.

And nothing else: each answer here is declared for its operation, as a problem where it is one.
"""

import sqlite3
from contextlib import contextmanager
from datetime import timedelta

import pytest
import sqlalchemy.exc
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from cairn.service.catalog.events.outbox import NewEvent, publish
from cairn.service.schemas import EventKind
from cairn.storage.store.clock import utc_now
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.conftest import BASE_URL, PEER
from tests.service.jobs import done, save_llama
from tests.service.seams import event_retention
from tests.service.test_openapi import (
    INVALID,
    QUERIES,
    UNKNOWN,
    described,
    example_body,
    operations,
)

RUN = "/v1/roots/default/runs/llama"
STALE = {"If-Match": '"7"'}
LARGE = b'"' + b" " * (2 << 20) + b'"'


class Failing:
    """A control plane whose every part raises."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, name):
        raise self._error


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("statuses") / "store"
    save_llama(folder / "llama")
    return folder


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    """With jobs, an artifact, an alias and a policy; it answers errors, as under uvicorn."""
    data = tmp_path_factory.mktemp("data")
    app = create_app(Settings(root=str(root), data_dir=data, scan_seconds=0))
    with TestClient(app, BASE_URL, client=PEER, raise_server_exceptions=False) as http:
        made = done(http, f"{RUN}/checkpoints/1:convert", {})
        http.post(
            f"{RUN}/checkpoints/1:promote",
            json={"alias": "production"},
            headers={"If-None-Match": "*"},
        )
        http.put(
            "/v1/roots/default/policies/retention/weekly",
            json={
                "policy": {
                    "kind": "retention",
                    "name": "weekly",
                    "cron": "0 4 * * 0",
                    "keep_last": 3,
                }
            },
            headers={"If-None-Match": "*"},
        )
        yield http, {"artifact": made["result"]["artifact_id"], "operation": made["id"]}


@pytest.fixture(scope="module")
def guarded(root, tmp_path_factory):
    """With keys, and little patience: an administrator's key that has asked once."""
    settings = Settings(
        root=str(root),
        data_dir=tmp_path_factory.mktemp("guarded"),
        scan_seconds=0,
        auth="keys",
        rate_limit=0.001,
    )
    settings.prepare()
    key = Keys(settings.database_url).make("impatient", "admin")
    with TestClient(create_app(settings, jobs=False), ADDRESS, client=ELSEWHERE) as http:
        for _ in range(500):
            if http.get("/v1/runs", headers=bearer(key)).status_code == 429:
                break
        yield http, key


DOCUMENT = described()
# 431 comes from what reads requests, before any operation: see test_connections.py.
TABLE = [
    pytest.param(
        method,
        path,
        [int(status) for status in operation["responses"] if "300" <= status != "431"],
        id=operation["operationId"],
    )
    for method, path, operation in sorted(operations(DOCUMENT), key=lambda one: one[1::-1])
    if path.startswith("/v1")
]


def address(path, values):
    path += QUERIES.get(path.rpartition(":")[2], "")
    for name, value in values.items():
        path = path.replace("{" + name + "}", value)
    return path


@contextmanager
def broken(http, error):
    whole = http.app.state.plane
    http.app.state.plane = Failing(error)
    try:
        yield
    finally:
        http.app.state.plane = whole


def database_error(kind, text):
    return kind("SELECT 1", {}, sqlite3.OperationalError(text))


FAULTS = {
    409: lambda: database_error(sqlalchemy.exc.IntegrityError, "UNIQUE constraint failed"),
    500: lambda: ZeroDivisionError("a bug"),
    503: lambda: database_error(sqlalchemy.exc.OperationalError, "database is locked"),
    507: lambda: database_error(sqlalchemy.exc.OperationalError, "database or disk is full"),
}
REAL = {
    "root": "default",
    "run": "llama",
    "step": "1",
    "checkpoint": "1",
    "alias": "production",
    "name": "config.json",
    "worker": "local",
    "key": "a" * 12,
    "webhook": "a" * 12,
    "delivery": "7",
    "leaf": "model/norm/scale",
    "kind": "retention",
    "policy": "weekly",
}


def prune_events(http):
    """Remove some events, of which the served run's are the first."""
    catalog = http.app.state.plane.catalog
    for number in range(3):
        with catalog.connect(("default", "llama")) as connection:
            event = NewEvent(EventKind.RUN_STALLED, "default", "llama", (number,), {})
            publish(connection, event)
    event_retention.prune_events(catalog, utc_now() + timedelta(days=1), ())


def visit(http, known, method, path, status):
    """The answer that a status is expected of."""
    real = {**REAL, "name": "_CHECKPOINT_METADATA"} if "/checkpoints/" in path else REAL
    url, body = address(path, {**real, **known}), example_body(method, path)
    if status in FAULTS:
        with broken(http, FAULTS[status]()):
            return http.request(method, url, json=body, headers={"If-Match": '"1"'})
    if status == 304:
        tag = http.get(url).headers["ETag"]
        return http.get(url, headers={"If-None-Match": tag})
    if status == 400:
        return http.request(
            method, url, content=b"{", headers={"Content-Type": "application/json", **STALE}
        )
    if status == 403:
        return http.request(method, url, json=body, headers={"Host": "evil.example"})
    if (status, path) == (404, "/v1/keys"):  # what it names is in the body
        return http.post(url, json={**body, "roots": ["nowhere"]})
    if status == 404:
        return http.request(method, address(path, UNKNOWN), json=body, headers=STALE)
    if path.endswith(":restore") and status in (412, 428):  # a fork rests on nothing
        body = {"mode": "rollback"}
    if status == 410:
        prune_events(http)
        return http.request(method, url, params={"after": 1})
    if status == 412:
        return http.request(method, url, json=body, headers=STALE)
    if status == 413:
        return http.request(
            method, url, content=LARGE, headers={"Content-Type": "application/json", **STALE}
        )
    if status == 416:
        return http.request(method, url, headers={"Range": "bytes=99999999-"})
    if status == 422:
        if "{" not in path:
            return http.request(method, url, params={"nonsense": "1"}, json=body)
        invalid = {**INVALID, "worker": "x" * 200}
        return http.request(method, address(path, invalid), json=body, headers=STALE)
    if status == 428:
        return http.request(method, url, json=body)
    raise AssertionError(f"no request here is answered {status}: add one")


@pytest.mark.parametrize(("method", "path", "statuses"), TABLE)
def test_every_status_that_an_operation_declares_is_answered(
    served, guarded, method, path, statuses
):
    for status in statuses:
        if status in (401, 429):
            http, key = guarded
            headers = {} if status == 401 else bearer(key)
            answer = http.request(
                method, address(path, UNKNOWN), json=example_body(method, path), headers=headers
            )
        else:
            answer = visit(*served, method, path, status)
        assert answer.status_code == status, answer.text
        if status == 304:
            assert answer.content == b""
            continue
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json"
        assert (problem["status"], problem["title"] != "") == (status, True)
        assert problem["type"].startswith("urn:cairn:problem:")
        if status in (429, 503):
            assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("path", sorted(path for path in DOCUMENT["paths"]))
def test_every_path_tells_which_methods_it_has(served, path):
    http, known = served
    url = address(path, {**REAL, **known})
    declared = {method.upper() for method in DOCUMENT["paths"][path]}
    missing = next(one for one in ("PUT", "PATCH", "DELETE") if one not in declared)
    answer = http.request(missing, url)
    assert answer.status_code == 405
    assert {*answer.headers["Allow"].split(", ")} - {"HEAD"} == declared


def test_the_table_has_every_status_that_clients_must_know():
    found = {status for one in TABLE for status in one.values[2]}
    assert {304, 400, 401, 403, 404, 409, 410, 412, 413, 416, 422, 428, 429, 500, 503, 507} <= found
