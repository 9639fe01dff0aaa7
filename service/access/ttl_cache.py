"""Short-lived cache of look-ups in a database: one look-up serves many requests."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")

TTL_SECONDS: Final = 2.0
"""Lifetime of an answer. A key that another process revokes is accepted here this much longer at
most."""

MAX_ANSWERS: Final = 10_000
"""Answers in the cache. Clients choose the names, and must not be able to fill the memory."""


class TTLCache(Generic[T]):
    """Cache of the results of a function that waits for a database.

    Args:
        lookup: Function that runs in a thread; it returns None for an unknown name.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, lookup: Callable[[str], T | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lookup = lookup
        self._clock = clock
        self._answers: dict[str, tuple[float, asyncio.Task[T | None]]] = {}

    async def get(self, name: str) -> T | None:
        """Return the answer for a name, at most `TTL_SECONDS` old; None: the name is unknown.

        An error of the look-up is raised, and not cached.
        """
        since, answer = self._answers.get(name, (float("-inf"), None))
        if answer is None or self._clock() - since >= TTL_SECONDS:
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            answer = asyncio.create_task(run_in_threadpool(self._lookup, name))
            self._answers[name] = self._clock(), answer
        try:
            return await asyncio.shield(answer)  # a cancelled caller must not cancel it for all
        except BaseException:
            self.forget(name)
            raise

    def has(self, name: str) -> bool:
        """Return whether the last look-up of a name has ended and returned something."""
        _, answer = self._answers.get(name, (0, None))
        return (
            answer is not None
            and answer.done()
            and not answer.cancelled()
            and answer.exception() is None
            and answer.result() is not None
        )

    def forget(self, name: str) -> None:
        """Drop the answer for a name."""
        self._answers.pop(name, None)
