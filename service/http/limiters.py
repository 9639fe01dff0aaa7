"""Limiters of requests: at the catalog for all, at the store for each root, with a time limit.

Catalog: threads that run Python hold each other, and the event loop, up by the GIL. The slowest of
eight pages that are read at once takes five times as long as the slowest of eight in turn (ADR 28).
So these requests wait in the event loop.

Store: a slow or silent store then holds a few threads, and the rest of the server goes on. No
caller gets all slots of a root: a job that announces saves without end keeps nobody from promoting.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from cairn.service.errors import NotReadyError

AT_ONCE: Final = 12
"""Requests of one root that use the store at a time."""

SHARE: Final = 8
"""Largest number of these for one caller."""

WAIT_SECONDS: Final = 5.0
"""Longest time that a request waits for a limiter."""

STREAMS_AT_ONCE: Final = 8
"""Long answers made of values of one root, at a time."""

STREAMS_SHARE: Final = 4
"""Largest number of these for one caller."""

VALUE_BYTES: Final = 1 << 30
"""Memory of all answers made of values, in all roots together. Most answers need 104 MiB. The
larger the chunks, the more memory an answer needs, and the fewer run at a time."""

VALUE_SHARE: Final = 512 << 20
"""Largest part of this memory for one caller or one root; a single answer may exceed it."""

ANSWER_SECONDS: Final = 30.0
"""Time limit for all store requests of one HTTP request."""


_in_catalog: ContextVar[bool] = ContextVar("in_catalog", default=False)


class StoreNeededError(Exception):
    """The catalog alone cannot answer; the route asks again under the store's limiter."""


def leave_catalog() -> None:
    """Raise in a catalog slot, before the store is read: that may be slow, and others wait.

    Raises:
        StoreNeededError: The caller has a catalog slot, and has to leave it.
    """
    if _in_catalog.get():
        raise StoreNeededError


class CatalogLimiter:
    """Limiter for all callers together; whoever has a slot waits for nothing but a database."""

    def __init__(self, at_once: int) -> None:
        """Allow `at_once` requests at a time."""
        self._slots = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot, in which only the catalog may be read.

        Raises:
            NotReadyError: No slot came free in time.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._slots.acquire()
        except TimeoutError as exc:
            raise NotReadyError(
                "the catalog's database is slow, and others wait for it already. Try again later."
            ) from exc
        token = _in_catalog.set(True)
        try:
            yield
        finally:
            _in_catalog.reset(token)
            self._slots.release()


@dataclass
class _SharedSemaphore:
    """Limiter of one name, with the number of requests that hold or await a slot."""

    slots: asyncio.Semaphore
    users: int = 0


class StoreLimiter:
    """Limiters of store requests: one for each root, and one for each caller in a root."""

    def __init__(self, at_once: int = AT_ONCE, share: int = SHARE) -> None:
        """Allow `at_once` requests in each root, of which one caller gets `share` at most."""
        self._at_once, self._share = at_once, share
        self._semaphores: dict[tuple[str, ...], _SharedSemaphore] = {}

    @asynccontextmanager
    async def slot(self, root: str, caller: str) -> AsyncIterator[None]:
        """Hold a slot of a root.

        Args:
            root: Name of the root in the request; there may be no such root.
            caller: Name of the caller.

        Raises:
            NotReadyError: No slot came free in time.
        """
        async with AsyncExitStack() as slots:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    # The caller's share first: whoever waits for it takes no slot of the root from
                    # others.
                    await slots.enter_async_context(self._slot((root, caller), self._share))
                    await slots.enter_async_context(self._slot((root,), self._at_once))
            except TimeoutError as exc:
                raise NotReadyError(
                    f"root {root!r}: the store is slow, and as many requests wait for it already "
                    f"as may ({self._at_once}; {self._share} of them {caller!r}'s). "
                    "What the catalog knows can be read meanwhile.",
                ) from exc
            yield

    @asynccontextmanager
    async def _slot(self, name: tuple[str, ...], at_once: int) -> AsyncIterator[None]:
        # The first request creates a limiter and the last one removes it: clients choose the names,
        # and must not be able to fill the memory.
        shared = self._semaphores.setdefault(name, _SharedSemaphore(asyncio.Semaphore(at_once)))
        shared.users += 1
        try:
            async with shared.slots:
                yield
        finally:
            shared.users -= 1
            if shared.users == 0:
                del self._semaphores[name]


@dataclass(eq=False)
class _Reservation:
    """Reservation of memory for an answer, granted or waiting."""

    owners: tuple[str, ...]
    nbytes: int
    granted: asyncio.Future[None]


class MemoryLimiter:
    """Limiter of the memory for answers made of values."""

    def __init__(self, max_bytes: int = VALUE_BYTES, share: int = VALUE_SHARE) -> None:
        """Allow `max_bytes` bytes, of which one owner gets `share` at most, or a single answer."""
        self._max_bytes, self._share = max_bytes, share
        self._waiting: list[_Reservation] = []
        self._reserved = 0
        self._by_owner = Counter[str]()

    @asynccontextmanager
    async def reserve(self, owners: tuple[str, ...], nbytes: int) -> AsyncIterator[None]:
        """Reserve memory for one answer.

        Args:
            owners: Names that the memory counts for: the root, so that slow readers of one root
                leave memory to others, and the caller.
            nbytes: Size in bytes.

        Raises:
            NotReadyError: The memory did not come free in time.
        """
        granted = asyncio.get_running_loop().create_future()
        # An answer that needs more than the limit runs alone.
        reservation = _Reservation(owners, min(nbytes, self._max_bytes), granted)
        self._waiting.append(reservation)
        self._admit()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await granted
            yield
        except TimeoutError as exc:
            # The memory was granted: the error is the block's own.
            if granted.done() and not granted.cancelled():
                raise
            raise NotReadyError(
                f"answers that are made of values have {self._max_bytes >> 20} MiB of memory, "
                f"{self._share >> 20} of them for {' and '.join(owners)} each, and it is in use. "
                "Ask again, or for one after another.",
            ) from exc
        finally:
            if reservation in self._waiting:
                self._waiting.remove(reservation)
            else:
                self._reserved -= reservation.nbytes
                self._by_owner -= Counter(
                    dict.fromkeys(owners, reservation.nbytes)
                )  # drops counts of 0
            self._admit()

    def _admit(self) -> None:
        """Grant memory to those that fit, in the order of their arrival."""
        for reservation in list(self._waiting):
            if (
                reservation.granted.cancelled()
            ):  # its request ended or timed out, and removes itself next
                continue
            if self._reserved + reservation.nbytes > self._max_bytes:
                return  # else smaller answers would starve a large one
            own = max(self._by_owner[owner] for owner in reservation.owners)
            if not own or own + reservation.nbytes <= self._share:
                self._waiting.remove(reservation)
                self._reserved += reservation.nbytes
                self._by_owner.update(dict.fromkeys(reservation.owners, reservation.nbytes))
                reservation.granted.set_result(None)
