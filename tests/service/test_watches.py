"""Streams of operations share one look at the database."""

import asyncio
import json
import logging
import threading
from contextlib import AsyncExitStack, aclosing

import httpx
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from cairn import create_app
from cairn.service.jobs.dbos_engine.jobs import Jobs, open_jobs
from cairn.service.jobs.watches import Watches
from cairn.service.schemas import OperationState, Progress
from tests.service.servers import serve

STREAMS = 30
LOOKS = 5


SOON = 60
"""Seconds after which a change counts as one that nobody heard of: not a time that it takes."""


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr("cairn.service.jobs.watches.POLL_SECONDS", 0.02)


@pytest.fixture
def jobs(settings):
    """Of a server without a worker: nothing happens to them but what the test does."""
    settings.prepare()
    opened = open_jobs(settings)
    yield opened
    opened.close()


@pytest.fixture
def queries():
    """Every query for jobs since the test began."""
    found = []

    def note(_connection, _cursor, statement, *_more):
        if "workflow_status" in statement or "workflow_events" in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield found
    event.remove(Engine, "before_cursor_execute", note)


def start(jobs, step=1):
    return jobs.start("convert", {"root": "default", "run": "run", "step": step})


class Looks:
    """The jobs, and whoever waits until they have been looked at so often."""

    def __init__(self, jobs):
        self._jobs = jobs
        self.count = 0
        self.asked = []

    def __getattr__(self, name):
        return getattr(self._jobs, name)

    def current(self, known):
        self.count += 1
        self.asked.append([*known])
        return self._jobs.current(known)

    async def more(self, number):
        ends = self.count + number
        async with asyncio.timeout(SOON):
            while self.count < ends:
                await asyncio.sleep(0.005)


async def change(states):
    """What a stream tells next, beside that nothing has changed for a while."""
    while (state := await anext(states)) is None:
        pass
    return state


async def watch(stack, watches, operation):
    """A stream that has told the first state and waits for the next; the task that has it."""
    states = await stack.enter_async_context(aclosing(watches.states(operation.id)))
    assert (await anext(states)).state is OperationState.PENDING
    return asyncio.create_task(change(states))


@pytest.mark.parametrize("operations", [1, 10])
def test_a_look_at_the_database_takes_as_many_queries_however_many_watch(jobs, queries, operations):
    counted = {}

    async def count(streams):
        looks = Looks(jobs)
        watches = Watches(looks)
        async with AsyncExitStack() as stack:
            tasks = [
                await watch(stack, watches, started[number % operations])
                for number in range(streams)
            ]
            queries.clear()
            await looks.more(LOOKS)
            counted[streams] = len(queries)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await watches.close()

    started = [start(jobs, step) for step in range(operations)]
    for streams in (operations, STREAMS):
        asyncio.run(count(streams))
    # A look may have been counted in part at either end.
    assert max(counted.values()) <= LOOKS + 1
    assert min(counted.values()) >= LOOKS - 1


def test_everybody_who_watches_hears_of_a_change_and_a_late_one_of_the_state_now(jobs):
    async def main():
        watches = Watches(jobs)
        operation = start(jobs)
        async with AsyncExitStack() as stack:
            tasks = [await watch(stack, watches, operation) for _ in range(STREAMS)]
            jobs.cancel(operation.id)
            for state in await asyncio.wait_for(asyncio.gather(*tasks), SOON):
                assert state == jobs.get(operation.id)
                assert state.state is OperationState.CANCELLED
            late = await stack.enter_async_context(aclosing(watches.states(operation.id)))
            assert [state async for state in late] == [jobs.get(operation.id)]
        await watches.close()

    asyncio.run(main())


class Counting:
    """One running operation that has done a byte more whenever it is asked for."""

    stopping = False

    def __init__(self, operation):
        self._operation = operation
        self._done = 0
        self.looking, self.looked = threading.Event(), threading.Event()

    def get(self, _id):
        self._done += 1
        return self._operation.model_copy(update={"progress": Progress(done_bytes=self._done)})

    def current(self, known):
        found = {name: self.get(name) for name in known}
        self.looking.set()
        assert self.looked.wait(10)
        return found


def test_who_comes_later_never_hears_what_was_before(jobs):
    """It has seen more than the look that is under way is about to tell."""

    async def bytes_done(states):
        return (await asyncio.wait_for(change(states), SOON)).progress.done_bytes

    async def main():
        operation = start(jobs)
        counting = Counting(operation)
        watches = Watches(counting)
        async with AsyncExitStack() as stack:
            first, second = watches.states(operation.id), watches.states(operation.id)
            for states in (first, second):
                await stack.enter_async_context(aclosing(states))
            assert await bytes_done(first) == 1
            hears = asyncio.create_task(bytes_done(first))
            assert await asyncio.to_thread(counting.looking.wait, SOON)
            assert await bytes_done(second) == 3  # and 2 is on its way
            counting.looked.set()
            assert await hears == 2
            assert await bytes_done(second) > 3
        await watches.close()

    asyncio.run(main())


def test_who_is_slow_holds_up_nobody_and_hears_the_newest(jobs):
    async def main():
        watches = Watches(jobs)
        operation = start(jobs)
        async with AsyncExitStack() as stack:
            slow = await stack.enter_async_context(aclosing(watches.states(operation.id)))
            assert (await anext(slow)).state is OperationState.PENDING  # and asks for nothing more
            quick = await watch(stack, watches, operation)
            jobs.cancel(operation.id)
            assert (await asyncio.wait_for(quick, SOON)).state is OperationState.CANCELLED
            assert [state.state async for state in slow] == [OperationState.CANCELLED]
        await watches.close()

    asyncio.run(main())


def test_streams_outlive_a_database_that_does_not_answer_for_a_while(jobs, monkeypatch, caplog):
    failures = iter([True] * 5)

    def current(self, known):
        if next(failures, False):
            raise OperationalError("SELECT", {}, Exception("server closed the connection"))
        return real(self, known)

    real = Jobs.current
    monkeypatch.setattr(Jobs, "current", current)

    async def main():
        watches = Watches(jobs)
        operation = start(jobs)
        async with AsyncExitStack() as stack:
            task = await watch(stack, watches, operation)
            jobs.cancel(operation.id)
            assert (await asyncio.wait_for(task, SOON)).state is OperationState.CANCELLED
        await watches.close()

    with caplog.at_level(logging.WARNING, Watches.__module__):
        asyncio.run(main())
    assert len([one for one in caplog.records if one.name == Watches.__module__]) == 1


def test_nothing_is_looked_at_once_nobody_watches(jobs):
    async def main():
        looks = Looks(jobs)
        watches = Watches(looks)
        operation = start(jobs)
        for _ in range(2):  # and is again, for who comes then
            async with AsyncExitStack() as stack:
                task = await watch(stack, watches, operation)
                await looks.more(1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert all(looks.asked)  # of none a database tells everything
            before = looks.count
            await asyncio.sleep(0.1)
            assert looks.count == before
        await watches.close()

    asyncio.run(main())


def test_quiet_streams_are_pinged_and_end_with_the_server(settings, monkeypatch):
    monkeypatch.setattr("cairn.service.jobs.watches.QUIET_SECONDS", 0.05)
    app = create_app(settings.model_copy(update={"worker": False}))
    with serve(app) as url:
        operation = start(app.state.plane.engine)
        path = f"{url}/v1/operations/{operation.id}/events"
        with httpx.stream("GET", path, timeout=30) as stream:
            lines = stream.iter_lines()
            while not (line := next(lines)).startswith("data: "):
                pass
            assert json.loads(line.removeprefix("data: "))["state"] == "pending"
            while next(lines) != ": ping":
                pass
            app.state.plane.engine.stopping = True
            assert set(lines) <= {"", ": ping"}
