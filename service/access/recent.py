"""Short-lived cache of look-ups in a database: one look-up serves many requests."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")

SECONDS: Final = 2.0
"""Lifetime of an answer. A key that another process revokes is accepted here this much longer at
most."""

MOST: Final = 10_000
"""Answers in the cache. Clients choose the names, and must not be able to fill the memory."""


class Recent(Generic[T]):
    """Cache of a function that waits for a database.

    Args:
        look: Function that runs in a thread; it returns None for an unknown name.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, look: Callable[[str], T | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look
        self._clock = clock
        self._answers: dict[str, tuple[float, asyncio.Task[T | None]]] = {}

    async def get(self, name: str) -> T | None:
        """Return the answer for a name, at most `SECONDS` old."""
        since, answer = self._answers.get(name, (float("-inf"), None))
        if answer is None or self._clock() - since >= SECONDS:
            if len(self._answers) >= MOST:
                self._answers.clear()
            answer = asyncio.create_task(run_in_threadpool(self._look, name))
            self._answers[name] = self._clock(), answer
        try:
            return await asyncio.shield(answer)  # a cancelled caller must not cancel it for others
        except BaseException:
            self.forget(name)
            raise

    def knows(self, name: str) -> bool:
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
