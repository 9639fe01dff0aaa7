"""Watches of jobs: one query at a time serves all watchers of all jobs."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Final, Protocol

from starlette.concurrency import run_in_threadpool

from cairn.service.schemas import Operation

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.2
QUIET_SECONDS: Final = 10.0


class JobStates(Protocol):
    """Queries that watches need. Each may block until the database answers."""

    stopping: bool

    def get(self, operation_id: str) -> Operation:
        """Return the current state of an operation.

        Raises:
            OperationNotFoundError: There is no such operation.
        """

    def current(self, last_seen: Mapping[str, Operation]) -> dict[str, Operation]:
        """Return the current states of these operations, by id; deleted ones are left out."""


class _Watched:
    """Operation with watchers.

    Attributes:
        operation: State at the last query.
        query: Number of the last query that found a change.
        changed: Event that is set at the next change.
        watchers: Number of watchers.
    """

    def __init__(self, operation: Operation, query: int) -> None:
        self.operation = operation
        self.query = query
        self.changed = asyncio.Event()
        self.watchers = 0

    def tell(self, operation: Operation, query: int) -> None:
        if operation != self.operation:
            self.operation, self.query = operation, query
            self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Watches:
    """Watchers of jobs in one event loop; a slow watcher does not delay the others.

    Args:
        jobs: Jobs to watch.
    """

    def __init__(self, jobs: JobStates) -> None:
        self._jobs = jobs
        self._watched: dict[str, _Watched] = {}
        self._queries = 0
        self._task: asyncio.Task[None] | None = None

    async def states(self, operation_id: str) -> AsyncGenerator[Operation | None]:
        """Yield the operation now and at every change, until it ends or the jobs stop.

        Yields None whenever `QUIET_SECONDS` pass without a change.

        Raises:
            OperationNotFoundError: There is no such operation.
        """
        began = self._queries  # results of queries up to this one are older than `current`
        current = await run_in_threadpool(self._jobs.get, operation_id)
        yield current
        if current.state.final:
            return
        with self._watching(current) as watched:
            while not self._jobs.stopping:
                changed = watched.changed
                if watched.query > began and watched.operation != current:
                    current = watched.operation
                    yield current
                    if current.state.final:
                        return
                    continue
                if self._watched.get(operation_id) is not watched:
                    return  # the operation was deleted
                try:
                    await asyncio.wait_for(changed.wait(), QUIET_SECONDS)
                except TimeoutError:
                    yield None

    async def close(self) -> None:
        """Stop the queries for all watchers."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @contextlib.contextmanager
    def _watching(self, operation: Operation) -> Iterator[_Watched]:
        watched = self._watched.setdefault(operation.id, _Watched(operation, self._queries))
        watched.watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            yield watched
        finally:
            watched.watchers -= 1
            if not watched.watchers and self._watched.get(operation.id) is watched:
                del self._watched[operation.id]

    async def _poll(self) -> None:
        """Query all watched operations again and again, while there are any."""
        answers = True
        while self._watched:
            await asyncio.sleep(POLL_SECONDS)
            if self._jobs.stopping:  # watchers reconnect to the next server
                break
            self._queries += 1
            last_seen = {name: watched.operation for name, watched in self._watched.items()}
            if not last_seen:  # all watchers left; for no ids, DBOS would list everything
                break
            try:
                operations = await run_in_threadpool(self._jobs.current, last_seen)
            except Exception as exc:  # any driver's error: the database may answer again
                if answers:
                    logger.warning("watched jobs cannot be looked at: %s", exc)
                answers = False
                continue
            answers = True
            for name in last_seen.keys() & self._watched.keys():
                if name in operations:
                    self._watched[name].tell(operations[name], self._queries)
                else:
                    self._watched.pop(name).wake()
        for watched in self._watched.values():
            watched.wake()
