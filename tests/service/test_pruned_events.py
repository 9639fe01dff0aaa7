"""Old events are removed once nobody has to be told of them, and who missed some is told so."""

import time
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from cairn.service.catalog import queries
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.events.automations import advance, positions
from cairn.service.catalog.events.outbox import NewEvent, publish
from cairn.service.catalog.events.retention import prune_events
from cairn.service.catalog.models import DeliveryRow, EventRow
from cairn.service.schemas import EventKind
from cairn.storage.store.clock import rfc3339, utc_now
from tests.service.jobs import serving
from tests.service.receivers import receiving
from tests.service.seams import event_retention, sender
from tests.service.stores import make_run


@pytest.fixture
def catalog(database_url):
    opened = Catalog.open(database_url)
    yield opened
    opened.close()


def happen(catalog, number, run="run", kind=EventKind.STEP_DURABLE, **detail):
    with catalog.connect(("default", run)) as connection:
        publish(connection, NewEvent(kind, "default", run, (number,), {"step": number, **detail}))


def prune(catalog, *, ahead=timedelta(hours=1), automations=()):
    """Events are removed as if it was later by so much."""
    removed = 0
    while found := prune_events(catalog, utc_now() + ahead, automations):
        removed += found
    return removed


def kept(catalog):
    with catalog.query() as connection:
        return [one.detail["step"] for one in queries.events(connection)]


def test_old_events_go_but_the_last_of_each_run_whose_number_is_counted_on(catalog, monkeypatch):
    monkeypatch.setattr(event_retention, "AT_ONCE", 2)
    for number in range(7):
        happen(catalog, number)
    happen(catalog, 7, run="other")
    assert prune(catalog, ahead=-timedelta(hours=1)) == 0
    assert prune(catalog) == 6
    assert kept(catalog) == [6, 7]
    happen(catalog, 8)
    with catalog.query() as connection:
        assert [one.sequence for one in queries.events(connection)] == [7, 1, 8]
    assert prune(catalog) == 1
    assert kept(catalog) == [7, 8]


def test_moves_that_an_automation_has_not_followed_stay_with_all_after_them(catalog):
    (begun,) = positions(catalog, ["export"]).values()
    assert begun == 0
    happen(catalog, 0)
    for number in (1, 2):
        happen(catalog, number, kind=EventKind.ALIAS_MOVED)
    happen(catalog, 3)
    assert prune(catalog, automations=["export"]) == 1
    assert kept(catalog) == [1, 2, 3]
    assert advance(catalog, "export", before=0, after=3)
    assert prune(catalog, automations=["export", "new"]) == 2
    assert kept(catalog) == [3]


def test_an_automation_that_was_removed_holds_nothing(catalog):
    positions(catalog, ["gone"])
    for number in (1, 2):
        happen(catalog, number, kind=EventKind.ALIAS_MOVED)
    assert prune(catalog) == 1


def test_ends_of_jobs_by_which_others_are_known_to_be_told_stay(catalog):
    now = utc_now()
    for number, ended in ((0, now + timedelta(hours=3)), (1, now)):
        happen(catalog, number, kind=EventKind.JOB_ENDED, ended=rfc3339(ended))
    happen(catalog, 2)
    assert prune(catalog) == 0
    assert kept(catalog) == [0, 1, 2]
    happen(catalog, 3, kind=EventKind.JOB_ENDED, ended=rfc3339(now + timedelta(hours=2)))
    happen(catalog, 4)
    assert prune(catalog) == 4


def test_a_reader_who_has_missed_some_is_told_where_to_go_on(http, root):
    catalog = http.app.state.plane.catalog
    for number in range(4):
        happen(catalog, number)

    def read(after):
        return http.get("/v1/events", params={"after": after})

    assert len(read(1).json()["events"]) == 3
    page = http.get("/v1/events", params={"page_size": 1}).json()
    assert prune(catalog) == 3
    answer = read(2)
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:cairn:problem:events-pruned")
    assert answer.json()["pruned"] == 3
    assert "continue after 3" in answer.json()["detail"]
    token = {"page_size": 1, "page_token": page["next_page_token"]}
    assert http.get("/v1/events", params=token).status_code == 410
    for after in (0, 3):
        assert [one["id"] for one in read(after).json()["events"]] == [4]
    assert read(4).json()["events"] == []


def rows(http, kind):
    with http.app.state.plane.catalog.read() as session:
        return session.scalar(select(func.count()).select_from(kind))


def until(reached):
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_sender_removes_what_was_delivered_and_keeps_what_was_not(root, tmp_path, monkeypatch):
    monkeypatch.setattr(sender, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(sender, "PRUNE_SECONDS", 0.02)
    make_run(root / "run", [3])
    settings = {"webhook_networks": "127.0.0.0/8", "event_days": 1e-9, "scan_seconds": 0}
    with receiving() as receiver, serving(root, tmp_path / "data", **settings) as http:
        receiver.decide = lambda event: 500
        made = http.post("/v1/webhooks", json={"url": receiver.url}).json()["details"]["id"]
        catalog = http.app.state.plane.catalog
        for number in range(3):
            happen(catalog, number)
        until(lambda: rows(http, DeliveryRow) >= 3)
        time.sleep(0.3)
        assert rows(http, EventRow) >= 3, "they are still to be delivered"
        http.delete(f"/v1/webhooks/{made}")
        until(lambda: len(kept(catalog)) == 1)
        assert rows(http, DeliveryRow) == 0
