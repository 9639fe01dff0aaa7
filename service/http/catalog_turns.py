"""Limiter for requests that the catalog alone can answer; they wait in the event loop.

Threads that run Python hold each other, and the loop, up by the GIL: the slowest of eight pages
that are read at once takes five times as long as the slowest of eight in turn (ADR 28).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

from cairn.service.errors import NotReadyError

WAIT_SECONDS: Final = 5.0
"""Longest time that a request waits for its turn."""

_has_turn: ContextVar[bool] = ContextVar("has_turn", default=False)


class StoreNeededError(Exception):
    """The catalog alone cannot answer; the route asks again under the store's limiter."""


def leave_catalog_turn() -> None:
    """Raise in a catalog turn, before the store is read: that may be slow, and others wait.

    Raises:
        StoreNeededError: The caller has a catalog turn, and has to leave it.
    """
    if _has_turn.get():
        raise StoreNeededError


class CatalogTurns:
    """Limiter for all callers together; whoever has a turn waits for nothing but a database."""

    def __init__(self, at_once: int) -> None:
        """Allow `at_once` requests at a time."""
        self._turns = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a turn, in which only the catalog may be read.

        Raises:
            NotReadyError: No turn came free in time.
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
