"""Requests that the catalog alone can answer wait for each other in the event loop, not in threads.

Of threads that run Python each keeps the others, and the loop, from going on: the slowest of eight
pages that are read at once takes five times as long as the slowest of eight in turn (ADR 28).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

from cairn.service.errors import NotReadyError

WAIT_SECONDS: Final = 5.0
"""How long a request waits for its turn."""

_has_turn: ContextVar[bool] = ContextVar("has_turn", default=False)


class StoreNeededError(Exception):
    """The catalog alone cannot answer; whoever has a turn asks anew, in the store's line."""


def leave_catalog_turn() -> None:
    """Called before the store is looked at, which may take long: others do not wait for that.

    Raises:
        StoreNeededError: The caller is in a turn, and has to leave it.
    """
    if _has_turn.get():
        raise StoreNeededError


class CatalogTurns:
    """The line, one for all callers: nobody in it waits for more than a database."""

    def __init__(self, at_once: int) -> None:
        """Of which `at_once` are asked for at a time."""
        self._turns = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Meanwhile nothing but the catalog may be asked.

        Raises:
            NotReadyError: Those before take too long.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turns.acquire()
        except TimeoutError as exc:
            raise NotReadyError(
                "the catalog's database is slow, and others wait for it already. Try again later."
            ) from exc
        token = _has_turn.set(True)
        try:
            yield
        finally:
            _has_turn.reset(token)
            self._turns.release()
