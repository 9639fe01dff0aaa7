"""What a look-up has found a moment ago, for whoever asks the same: one look for many requests."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")

SECONDS: Final = 2.0
"""How long an answer counts: what was revoked elsewhere is refused here that much later at most."""

MOST: Final = 10_000
"""Answers that are kept; names come from outside, and shall not fill the memory."""


class Recent(Generic[T]):
    """Answers of a function that waits for a database.

    Args:
        look: Asked in a thread; None: there is nothing of that name.
        clock: Monotonic seconds.
    """

    def __init__(
        self, look: Callable[[str], T | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look
        self._clock = clock
        self._answers: dict[str, tuple[float, asyncio.Task[T | None]]] = {}

    async def get(self, name: str) -> T | None:
        """What there is of a name now, or was a moment ago."""
        asked, answer = self._answers.get(name, (float("-inf"), None))
        if answer is None or self._clock() - asked >= SECONDS:
            if len(self._answers) >= MOST:
                self._answers.clear()
            answer = asyncio.create_task(run_in_threadpool(self._look, name))
            self._answers[name] = self._clock(), answer
        try:
            return await asyncio.shield(answer)  # others may wait for it too
        except BaseException:
            self.forget(name)
            raise

    def knows(self, name: str) -> bool:
        """Whether there was something of that name, the last time that it was looked for."""
        _, answer = self._answers.get(name, (0, None))
        return (
            answer is not None
            and answer.done()
            and not answer.cancelled()
            and answer.exception() is None
            and answer.result() is not None
        )

    def forget(self, name: str) -> None:
        """Look again, the next time."""
        self._answers.pop(name, None)
