"""What happens to checkpoints becomes events: one for each, in order, with what tells of it."""

import shutil
import threading
from datetime import timedelta

import pytest
from sqlalchemy.exc import OperationalError

from cairn import delete_alias, parse_uri, promote_step
from cairn.service.catalog import queries, rows
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.events.outbox import NewEvent, publish
from cairn.service.catalog.refresh import Index
from cairn.service.schemas import EventKind
from cairn.storage.store.clock import utc_now
from tests.service.seams import detector
from tests.service.stores import add_steps, begin_saving, make_run, trash

RUN = "/v1/roots/default/runs/run"
CREATE = {"If-None-Match": "*"}


@pytest.fixture
def run(root):
    return make_run(root / "run", [3, 6])


@pytest.fixture
def looked(http, run):
    """The run's root was looked at: what comes is new."""
    http.get("/v1/runs")
    return http


def promote(http, step, headers, alias="production"):
    answer = http.post(f"{RUN}/checkpoints/{step}:promote", json={"alias": alias}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refresh(http):
    assert http.get(RUN, params={"refresh": "true"}).status_code == 200


def events(http, **asked):
    with http.app.state.plane.catalog.query() as connection:
        return queries.events(connection, **asked)


def told(http):
    """Kind, and what it is of, of every event but those of the first look."""
    found = []
    for one in events(http):
        detail = one.detail
        if one.kind == "step.durable":
            found.append((one.kind, detail["step"]))
        elif one.kind.startswith("alias"):
            before = detail["before"] and detail["before"]["sequence"]
            found.append((one.kind, detail["sequence"], before))
        else:
            found.append((one.kind, detail["step"]))
    return found


STEPS = [("step.durable", 3), ("step.durable", 6)]


def test_promotion_and_deletion_of_an_alias_are_one_event_each(looked):
    promote(looked, 3, CREATE)
    promote(looked, 6, {"If-Match": '"1"'})
    assert looked.delete(f"{RUN}/aliases/production", headers={"If-Match": '"2"'}).is_success
    refresh(looked)
    promote(looked, 3, CREATE)
    refresh(looked)
    assert told(looked) == [
        *STEPS,
        ("alias.moved", 1, None),
        ("alias.moved", 2, 1),
        ("alias.deleted", 3, 2),
        ("alias.moved", 4, None),
    ]
    assert [one.sequence for one in events(looked)] == [1, 2, 3, 4, 5, 6]


def test_what_went_around_the_service_is_told_move_by_move(looked, run):
    promote(looked, 3, CREATE)
    promote_step(run, 6, "production", by="ann@host", expect=1)
    promote_step(run, 3, "production", by="ben@host", expect=2)
    refresh(looked)
    delete_alias(run, "production", expect=3)
    promote_step(run, 6, "production", expect=None)
    refresh(looked)
    delete_alias(run, "production", expect=5)
    refresh(looked)
    assert told(looked)[2:] == [
        ("alias.moved", 1, None),
        ("alias.moved", 2, 1),
        ("alias.moved", 3, 2),
        ("alias.deleted", 4, 3),
        ("alias.moved", 5, None),
        ("alias.deleted", 6, 5),
    ]
    assert [one.detail["by"] for one in events(looked)[3:5]] == ["ann@host", "ben@host"]


def test_two_servers_and_a_look_write_one_event_of_a_move(looked, run):
    plane = looked.app.state.plane
    others = [Index(plane.catalog) for _ in range(2)]
    moved = promote_step(run, 3, "production", expect=None)
    for index in others:
        index.refresh_run("default", run, anew=True)
    with plane.catalog.connect(("default", "run")) as connection:
        rows.write_alias(connection, "default", "run", moved)
    assert told(looked)[2:] == [("alias.moved", 1, None)]


def test_a_record_that_was_put_back_is_told_again_and_so_is_what_follows(looked, run, root):
    promote(looked, 3, CREATE)
    path = root / "run" / "aliases" / "production.json"
    old = path.read_bytes()
    promote(looked, 6, {"If-Match": '"1"'})
    path.unlink()
    path.write_bytes(old)
    refresh(looked)
    refresh(looked)
    promote(looked, 6, {"If-Match": '"1"'})
    assert told(looked)[2:] == [
        ("alias.moved", 1, None),
        ("alias.moved", 2, 1),
        ("alias.moved", 1, 2),
        ("alias.moved", 3, 2),
    ]


def test_an_alias_whose_record_is_unreadable_for_a_while_is_told_once(looked, root):
    promote(looked, 3, CREATE)
    promote(looked, 6, {"If-Match": '"1"'})
    path = root / "run" / "aliases" / "production.json"
    kept = path.read_bytes()
    for data in (b"{", kept):
        path.unlink()
        path.write_bytes(data)
        refresh(looked)
    assert told(looked)[2:] == [("alias.moved", 1, None), ("alias.moved", 2, 1)]


def test_a_step_is_told_once_it_is_durable_also_after_an_undone_deletion(looked, run, root):
    add_steps(run, [9], base_step=6)
    refresh(looked)
    trash(run, 9, 2)
    refresh(looked)
    (root / "run" / "trash" / "9.2.json").unlink()
    refresh(looked)
    assert told(looked) == [*STEPS, ("step.durable", 9)]


def test_a_new_run_of_a_root_that_was_looked_at_is_told_from_its_first_step(looked, root):
    make_run(root / "other", [1])
    looked.get("/v1/runs", params={"refresh": "true"})
    assert [(one.run, one.sequence) for one in events(looked)][2:] == [("other", 1)]


def test_old_steps_of_a_run_that_is_new_in_a_root_are_told_too(looked, root, monkeypatch):
    monkeypatch.setattr(rows, "FRESH", timedelta(0))
    make_run(root / "copied", [1, 2])
    looked.get("/v1/runs", params={"refresh": "true"})
    assert [one.detail["step"] for one in events(looked, run="copied")] == [1, 2]


def test_what_a_root_held_long_before_its_first_look_is_no_event(root, http, monkeypatch):
    make_run(root / "run", [3])
    monkeypatch.setattr(rows, "FRESH", timedelta(0))
    http.get("/v1/runs")
    assert events(http) == []


def test_a_run_made_anew_under_its_name_is_told_anew(looked, root):
    promote(looked, 3, CREATE)
    shutil.rmtree(root / "run")
    looked.get("/v1/runs", params={"refresh": "true"})
    make_run(root / "run", [3])
    looked.get("/v1/runs", params={"refresh": "true"})
    promote(looked, 3, CREATE)
    assert told(looked)[2:] == [
        ("alias.moved", 1, None),
        ("step.durable", 3),
        ("alias.moved", 1, None),
    ]
    assert [one.sequence for one in events(looked)] == [1, 2, 3, 4, 5]


def test_a_writer_that_is_gone_in_the_middle_of_a_save_stalls_its_run(looked, run, root):
    begin_saving(run, 9)
    refresh(looked)
    assert told(looked) == STEPS
    (root / "run" / "lease.json").unlink()
    refresh(looked)
    refresh(looked)
    assert told(looked) == [*STEPS, ("run.stalled", 9)]


def test_an_event_and_what_it_tells_of_are_written_together_or_not_at_all(looked, monkeypatch):
    def failing(*_):
        raise OperationalError("INSERT", {}, Exception("disk is full"))

    real = rows.publish_all
    monkeypatch.setattr(rows, "publish_all", failing)
    promote(looked, 3, CREATE)  # the store has it; the note of it failed
    assert looked.get(f"{RUN}/aliases").json()["aliases"] == []
    monkeypatch.setattr(rows, "publish_all", real)
    refresh(looked)
    assert told(looked)[2:] == [("alias.moved", 1, None)]


def test_a_run_of_many_steps_is_told_whole_in_order_and_once(looked, root):
    make_run(root / "long", range(1, 1203))
    for _ in range(2):
        looked.get("/v1/runs", params={"refresh": "true"})
    found = events(looked, run="long", limit=2000)
    assert [one.detail["step"] for one in found] == [*range(1, 1203)]
    assert [one.sequence for one in found] == [*range(1, 1203)]
    assert [one.id for one in found] == sorted(one.id for one in found)


def test_whoever_reads_on_from_an_event_misses_none_that_was_begun_before_it(database_url):
    catalog = Catalog.open(database_url)

    def write(run, wait):
        one = NewEvent(EventKind.RUN_STALLED, "default", run, (run,), {})
        with catalog.connect(("default", run)) as connection:
            publish(connection, one)
            wait()

    def seen():
        with catalog.query() as connection:
            return [one.run for one in queries.events(connection)]

    begun, end = threading.Event(), threading.Event()
    first = threading.Thread(target=write, args=("a", lambda: (begun.set(), end.wait(30))))
    second = threading.Thread(target=write, args=("b", lambda: None))
    first.start()
    assert begun.wait(30)
    second.start()
    second.join(0.5)
    assert seen() == []  # the second waits: else it would be seen first, and the first missed
    end.set()
    first.join(30)
    second.join(30)
    assert seen() == ["a", "b"]
    catalog.close()


def test_root_is_behind_when_its_next_look_is_overdue(looked, root):
    catalog, uri = looked.app.state.plane.catalog, parse_uri(root)
    watching = detector.EventDetector(catalog, None, {"default": uri}, scans=True)
    first = utc_now()

    def told(scanned, later):
        """Whether it is told, of a last look then, after so many seconds more."""
        with catalog.write(("default", "")) as session:
            rows.write_root(session, "default", uri, scanned=scanned, problem=None)
        watching.index(scanned + timedelta(seconds=later))
        return len([one for one in events(looked) if one.kind == EventKind.INDEX_BEHIND])

    assert told(first, 899) == 0
    assert told(first, 901) == 1  # nobody knows how far apart its looks are
    second = first + timedelta(seconds=6000)
    assert told(second, 0) == 1
    assert told(second, 6010) == 1  # as the look before
    assert told(second, 12_010) == 2
