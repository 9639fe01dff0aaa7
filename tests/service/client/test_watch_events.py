"""Events are watched for ever: each once, in order, over restarts of the server."""

import asyncio
import itertools
import socket
import time

import pytest

from cairn import AsyncClient, Client
from cairn.service.errors import EventsLostError, ProblemResponseError, ServerUnreachableError
from cairn.service.schemas import Event, EventKind, EventList
from tests.service.planes import running_plane
from tests.service.servers import reply, scripted, serve
from tests.service.stores import add_steps, make_run

AT = "2026-11-21T10:00:00Z"


def event(number, kind="alias.moved", uid="evt"):
    return Event(
        id=number,
        uid=f"{uid}_{number}",
        kind=kind,
        root="default",
        run="run",
        sequence=number,
        at=AT,
        detail={},
    )


def page(*events, more=None, position=None):
    position = position or (events[-1].id if events else 0)
    found = EventList(events=events, position=position, next_page_token=more)
    return reply(200, found.model_dump_json().encode())


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def url(app):
    with serve(app) as url:
        yield url


@pytest.fixture
def run(root, url):
    """A run of whose moves events are told."""
    run = make_run(root / "run", [1, 2, 3])
    with Client(url) as client:
        list(client.runs(refresh=True))
    return run


def move(client, times):
    alias = next((one for one in client.aliases("run") if one.alias == "production"), None)
    sequence = alias and alias.sequence
    for number in range(times):
        sequence = client.promote("run", 1 + number % 3, "production", expect=sequence).sequence


def test_a_watcher_misses_nothing_while_the_server_is_killed_and_started_again(tmp_path, port):
    make_run(tmp_path / "store" / "run", [1, 2, 3])
    (tmp_path / "data").mkdir()

    def plane():
        return running_plane(tmp_path / "store", tmp_path / "data", port=port)

    async def watch(seen, url):
        async with AsyncClient(url) as cairn:
            async for one in cairn.watch_events(kinds=["alias.moved"], run="run", patience=60):
                seen.append(one.detail["sequence"])

    async def job():
        seen, moved = [], 0
        watching = asyncio.create_task(watch(seen, f"http://127.0.0.1:{port}"))
        for times in (2, 3, 4):
            with plane() as (url, process), Client(url) as client:
                await asyncio.to_thread(move, client, times)
                moved += times
                process.kill()  # before the watcher has seen all, most likely
            await asyncio.sleep(0.3)
        with plane() as (url, _), Client(url) as client:
            deadline = time.monotonic() + 60
            while len(seen) < moved and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            await asyncio.sleep(2.5)  # one more look: nothing comes twice
            listed = [one.detail["sequence"] for one in client.events(kind="alias.moved")]
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        return seen, listed, moved

    seen, listed, moved = asyncio.run(job())
    assert seen == listed
    assert len(seen) == moved
    assert seen == sorted(set(seen))


def test_who_goes_on_from_the_last_event_sees_each_once(run, url):
    seen, after = [], 0
    with Client(url) as client:
        move(client, 5)
        for _ in range(3):  # three starts of a program
            for one in itertools.islice(client.watch_events(after=after), 2):
                seen.append(one)
                after = one.id
        assert seen == list(client.events())[:6]


def test_what_happens_later_comes(run, url):
    with Client(url) as client:
        move(client, 1)
        watched = client.watch_events(kinds=[EventKind.ALIAS_MOVED])
        assert next(watched).detail["step"] == 1
        move(client, 1)
        assert next(watched).detail["step"] == 1


def test_only_what_is_asked_for_comes(run, url, root):
    make_run(root / "other", [1])
    with Client(url) as client:
        list(client.runs(refresh=True))
        move(client, 2)
        client.promote("other", 1, "production", expect=None)
        add_steps(run, [4])
        list(client.runs(refresh=True))
        kinds = ["alias.moved", EventKind.STEP_DURABLE]
        watched = client.watch_events(kinds=kinds, run="run", root="default")
        found = [(one.run, one.kind) for one in itertools.islice(watched, 6)]
        assert found == [("run", "step.durable")] * 3 + [("run", "alias.moved")] * 2 + [
            ("run", "step.durable")
        ]


@pytest.mark.parametrize("kinds", [["alias.move"], ["alias.moved", "alias.move"], []])
def test_a_kind_that_there_is_not_is_refused_and_not_waited_for(url, kinds):
    with Client(url) as client, pytest.raises(ProblemResponseError, match=r"kind.*alias.moved"):
        next(client.watch_events(kinds=kinds))


def test_a_position_that_the_server_does_not_have_is_refused(run, url):
    with Client(url) as client, pytest.raises(EventsLostError, match=r"expected event 4711.*none"):
        next(client.watch_events(after=4711))


def test_a_catalog_that_was_made_anew_meanwhile_is_found_out():
    """Its events have the ids of others: who went on would miss those before."""
    old, new = (event(1), event(2)), (event(2, uid="new"), event(3, uid="new"))
    replies = (page(*old), page(new[1]), page(new[0]))
    with scripted(*replies) as (url, _), Client(url) as client:
        watched = client.watch_events()
        assert [next(watched).uid, next(watched).uid] == ["evt_1", "evt_2"]
        with pytest.raises(EventsLostError, match=r"expected event 2.*found another one"):
            next(watched)


def test_more_than_an_answer_holds_is_asked_for_at_once():
    first, second = event(1), event(2)
    replies = (page(first, more="more"), page(second), page(first))
    with scripted(*replies) as (url, requests), Client(url) as client:
        assert list(itertools.islice(client.watch_events(), 2)) == [first, second]
    asked = [one.path.partition("after=")[2].partition("&")[0] for one in requests]
    assert asked == ["0", "1", "0"]


def test_who_watches_what_seldom_happens_outlives_what_is_not_kept_any_more():
    """The events in between were of others; the last one that was seen is gone with them."""
    gone = reply(410, b'{"pruned": 5}', Content_Type="application/problem+json")
    later = page(event(10))
    replies = (page(event(1)), page(position=9), gone, later)
    with scripted(*replies) as (url, requests), Client(url) as client:
        watched = client.watch_events(run="run")
        assert [next(watched).id, next(watched).id] == [1, 10]
    asked = [one.path.partition("after=")[2].partition("&")[0] for one in requests]
    assert asked == ["0", "1", "0", "9"]


def test_who_has_missed_what_is_not_kept_any_more_is_told_so():
    gone = reply(410, b'{"pruned": 5}', Content_Type="application/problem+json")
    error = pytest.raises(ProblemResponseError)
    with scripted(gone) as (url, _), Client(url) as client, error as caught:
        next(client.watch_events(after=3))
    assert caught.value.problem["pruned"] == 5


def test_fewer_events_than_were_seen_are_those_of_another_catalog():
    replies = (page(event(1)), page(position=9), page(event(1)), page(position=3))
    with scripted(*replies) as (url, _), Client(url) as client:
        watched = client.watch_events()
        next(watched)
        with pytest.raises(EventsLostError, match="expected event"):
            next(watched)


def test_a_server_that_stays_away_ends_the_watch(port):
    with Client(f"http://127.0.0.1:{port}") as client:
        began = time.monotonic()
        with pytest.raises(ServerUnreachableError):
            next(client.watch_events(patience=0.5))
    assert time.monotonic() - began >= 0.5
