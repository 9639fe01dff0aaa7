"""Limiters of requests: one of the catalog for all requests, and one of the store for each root.

Catalog: because of the GIL, threads that run Python delay each other and the event loop. Of eight
pages that are read at once, the slowest takes five times as long as the slowest of eight that are
read one after the other (ADR 28). So requests wait in the event loop, not in threads.

Store: a slow or silent store blocks only a few threads, and the rest of the server goes on. No
caller gets all slots of a root: a job that announces saves without end must not keep others from
promoting.
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
"""Largest number of requests that use the store of one root at the same time."""

SHARE: Final = 8
"""Largest number of these requests for one caller."""

WAIT_SECONDS: Final = 5.0
"""Longest time that a request waits for a limiter, in seconds."""

STREAMS_AT_ONCE: Final = 8
"""Largest number of long answers made of values, at the same time in one root."""

STREAMS_SHARE: Final = 4
"""Largest number of these answers for one caller."""

VALUE_BYTES: Final = 1 << 30
"""Memory for all answers made of values, in all roots together, in bytes.

Most answers need 104 MiB. The larger the chunks, the more memory an answer needs, and the fewer
answers run at the same time.
"""

VALUE_SHARE: Final = 512 << 20
"""Largest part of this memory for one caller or one root; a single answer may exceed it."""

ANSWER_SECONDS: Final = 30.0
"""Time limit for all requests to the store that one HTTP request causes, in seconds."""


_in_catalog: ContextVar[bool] = ContextVar("in_catalog", default=False)


class StoreNeededError(Exception):
    """The catalog alone cannot answer; the route tries again with a slot of the store."""


def leave_catalog() -> None:
    """Raise if the caller has a slot of the catalog; call this before the store is read.

    The store may be slow, and other requests wait for the slot.

    Raises:
        StoreNeededError: The caller has a slot of the catalog, and must leave it.
    """
    if _in_catalog.get():
        raise StoreNeededError


class CatalogLimiter:
    """Limiter of the requests that the catalog answers, for all callers together.

    A request with a slot waits for nothing but a database.
    """

    def __init__(self, at_once: int) -> None:
        """Allow `at_once` requests at a time."""
        self._slots = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot during the block, which may read only the catalog.

        Raises:
            NotReadyError: No slot became free in time.
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
    """Semaphore, with the number of requests that have a slot of it or wait for one."""

    slots: asyncio.Semaphore
    users: int = 0


class StoreLimiter:
    """Limiters of store requests: one for each root, and one for each caller in a root."""

    def __init__(self, at_once: int = AT_ONCE, share: int = SHARE) -> None:
        """Set the limits.

        Args:
            at_once: Largest number of requests at a time in one root.
            share: Largest number of these for one caller.
        """
        self._at_once, self._share = at_once, share
        self._semaphores: dict[tuple[str, ...], _SharedSemaphore] = {}

    @asynccontextmanager
    async def slot(self, root: str, caller: str) -> AsyncIterator[None]:
        """Hold a slot of a root during the block.

        Args:
            root: Name of the root in the request; there may be no such root.
            caller: Name of the caller.

        Raises:
            NotReadyError: No slot became free in time.
        """
        async with AsyncExitStack() as slots:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    # The caller's share first: a request that waits for its share must not occupy a
                    # slot of the root.
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
    """Memory for one answer, reserved or requested."""

    owners: tuple[str, ...]
    nbytes: int
    granted: asyncio.Future[None]


class MemoryLimiter:
    """Limiter of the memory for answers made of values."""

    def __init__(self, max_bytes: int = VALUE_BYTES, share: int = VALUE_SHARE) -> None:
        """Set the limits.

        Args:
            max_bytes: Memory for all answers, in bytes.
            share: Largest part of it for one owner; a single answer may exceed it.
        """
        self._max_bytes, self._share = max_bytes, share
        self._waiting: list[_Reservation] = []
        self._reserved = 0
        self._by_owner = Counter[str]()

    @asynccontextmanager
    async def reserve(self, owners: tuple[str, ...], nbytes: int) -> AsyncIterator[None]:
        """Reserve memory for one answer during the block.

        Args:
            owners: Names whose share the memory counts for: the root, so that slow readers of one
                root leave memory to others, and the caller.
            nbytes: Size in bytes.

        Raises:
            NotReadyError: The memory did not become free in time.
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
            # The memory was granted, so the error comes from the block.
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
        """Grant memory to waiting answers that fit, in the order of their arrival."""
        for reservation in list(self._waiting):
            if (
                reservation.granted.cancelled()
            ):  # its request ended or timed out, and removes it next
                continue
            if self._reserved + reservation.nbytes > self._max_bytes:
                return  # else smaller answers would starve a large one
            own = max(self._by_owner[owner] for owner in reservation.owners)
            if not own or own + reservation.nbytes <= self._share:
                self._waiting.remove(reservation)
                self._reserved += reservation.nbytes
                self._by_owner.update(dict.fromkeys(reservation.owners, reservation.nbytes))
                reservation.granted.set_result(None)
