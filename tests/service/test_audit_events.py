import pytest
from fastapi.testclient import TestClient

from cairn import Settings, create_app
from cairn.service.catalog.audit import AuditEntry
from cairn.service.catalog.engine import Catalog
from tests.service.access.conftest import ADDRESS, ELSEWHERE, Keys, bearer
from tests.service.conftest import BASE_URL, PEER
from tests.service.stores import make_run
from tests.service.test_search_queries import pages

EVENTS = "/v1/audit-events"
CHECKPOINTS = "/v1/roots/default/runs/run/checkpoints"


@pytest.fixture
def http(some_database_url, root, tmp_path):
    settings = Settings(
        root=str(root), data_dir=tmp_path / "data", database_url=some_database_url, scan_seconds=0
    )
    with TestClient(create_app(settings, jobs=False), BASE_URL, client=PEER) as client:
        yield client


def events(http, filter="", **parameters):
    return pages(http, EVENTS, filter=filter, **parameters)


def test_trail_tells_what_was_asked_newest_first(http, root):
    make_run(root / "run", [1, 2])
    body, first = {"alias": "best", "reason": "first"}, {"If-None-Match": "*"}
    assert http.post(f"{CHECKPOINTS}/1:promote", json=body, headers=first).is_success
    assert http.post(f"{CHECKPOINTS}/2:promote", json=body, headers=first).status_code == 412
    labels = {"labels": {"stage": "final"}}
    changed = http.patch(f"{CHECKPOINTS}/2", json=labels, headers={"If-Match": "*"})
    annotated, refused, promoted = events(http)
    assert [one["action"] for one in (annotated, refused, promoted)] == [
        "checkpoint.annotate",
        "alias.promote",
        "alias.promote",
    ]
    assert [one["outcome"] for one in (annotated, refused, promoted)] == ["done", "refused", "done"]
    assert {one["caller"] for one in (annotated, refused, promoted)} == {"loopback"}
    assert (promoted["root"], promoted["run"], promoted["detail"]["step"]) == ("default", "run", 1)
    assert annotated["request_id"] == changed.headers["X-Request-ID"]
    assert annotated["at"] <= annotated["completed"]
    assert annotated["detail"]["labels"] == {"stage": "final"}


def begin(catalog, action, **values):
    given = {"actor": "ana", "root": "default", "run": "run", "detail": {}, **values}
    return AuditEntry.begin(catalog, action, **given)


@pytest.fixture
def trail(http, some_database_url):
    catalog = Catalog.open(some_database_url)
    begin(catalog, "alias.promote").complete()
    begin(catalog, "alias.promote", run="other").complete("refused")
    begin(catalog, "alias.delete", actor="bo", root="second").complete("failed")
    begin(catalog, "key.create", actor="bo", root="", run="")
    catalog.close()
    return events(http)


@pytest.mark.parametrize(
    ("filter", "found"),
    [
        ("root = default", [2, 1]),
        ("root = default AND run = other", [2]),
        ("action = alias.promote", [2, 1]),
        ("caller = bo", [4, 3]),
        ("caller != bo", [2, 1]),
        ("outcome = refused OR outcome = failed", [3, 2]),
        ("NOT outcome:*", [4]),
        ("run:*", [3, 2, 1]),
        ('NOT root:* AND action = "key.create"', [4]),
        ("at > 2026-01-01T00:00:00Z", [4, 3, 2, 1]),
        ("at < 2026-01-01T00:00:00Z", []),
        ('caller = "\' OR 1=1 --"', []),
    ],
)
def test_entries_are_found_by_root_run_action_caller_and_time(http, trail, filter, found):
    first = trail[-1]["id"]
    assert [one["id"] - first + 1 for one in events(http, filter, size=1)] == found


def test_entry_of_no_root_in_particular_says_so(trail):
    assert (trail[0]["root"], trail[0]["run"], trail[0]["outcome"]) == (None, None, None)


def test_entries_before_and_after_a_time_are_all(http, trail):
    time = trail[2]["at"]
    later, earlier = events(http, f"at > {time}"), events(http, f"at <= {time}")
    assert [*later, *earlier] == trail
    assert len(earlier) == 2


def test_pages_are_right_while_others_are_entered(http, trail, some_database_url):
    catalog = Catalog.open(some_database_url)
    seen = events(http, size=1, between=lambda: begin(catalog, "alias.promote").complete())
    catalog.close()
    assert seen == trail


@pytest.mark.parametrize(
    ("filter", "complaint"),
    [
        ("step = 3", "expected a field: at, caller, action, root, run, outcome"),
        ("outcome = dnoe", "(did you mean done?)"),
    ],
)
def test_what_is_no_filter_of_the_trail_is_refused(http, filter, complaint):
    answer = http.get(EVENTS, params={"filter": filter})
    assert answer.status_code == 422
    assert complaint in answer.json()["detail"]


def test_trail_is_read_by_administrators_of_all_roots_alone(root, tmp_path):
    settings = Settings(root=str(root), data_dir=tmp_path / "data", auth="keys", scan_seconds=0)
    settings.prepare()
    keys = Keys(settings.database_url)
    made = {
        "read": (keys.make("reader"), 403),
        "operate": (keys.make("operator", "operate"), 403),
        "one root": (keys.make("local", "admin", roots=["default"]), 403),
        "admin": (keys.make("chief", "admin"), 200),
    }
    with TestClient(create_app(settings, jobs=False), ADDRESS, client=ELSEWHERE) as http:
        assert http.get(EVENTS).status_code == 401
        for key, status in made.values():
            assert http.get(EVENTS, headers=bearer(key)).status_code == status
