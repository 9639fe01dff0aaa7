"""Limiters for requests that need the store: one for each root, with a time limit.

A slow or silent store then holds a few threads, and the rest of the server goes on. No caller gets
all turns of a root: a job that announces saves without end keeps nobody from promoting.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from fastapi import Request, Response
from starlette.background import BackgroundTask

from cairn.service.errors import NotReadyError
from cairn.service.http.catalog_turns import CatalogTurns, StoreNeededError
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.storage.store.deadlines import within

AT_ONCE: Final = 12
"""Requests of one root that use the store at a time."""

SHARE: Final = 8
"""Largest number of these for one caller."""

WAIT_SECONDS: Final = 5.0
"""Longest time that a request waits for its turn."""

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

_READS: Final = frozenset({"GET", "HEAD"})
_TRUE: Final = frozenset({"1", "true", "on", "yes", "t", "y"})


@dataclass
class _Line:
    """Limiter of one name, with the number of requests that hold or await a turn."""

    turns: asyncio.Semaphore
    people: int = 0


class StoreTurns:
    """Limiters of turns: one for each root, and before it one for each caller in the root."""

    def __init__(self, at_once: int = AT_ONCE, share: int = SHARE) -> None:
        """Allow `at_once` turns in each root, of which one caller gets `share` at most."""
        self._at_once, self._share = at_once, share
        self._lines: dict[tuple[str, ...], _Line] = {}

    @asynccontextmanager
    async def turn(self, root: str, caller: str) -> AsyncIterator[None]:
        """Hold a turn of a root.

        Args:
            root: Name of the root in the request; there may be no such root.
            caller: Name of the caller.

        Raises:
            NotReadyError: No turn came free in time.
        """
        async with AsyncExitStack() as places:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    # The caller's share first: whoever waits for it takes no turn of the root from
                    # others.
                    await places.enter_async_context(self._place((root, caller), self._share))
                    await places.enter_async_context(self._place((root,), self._at_once))
            except TimeoutError as exc:
                raise NotReadyError(
                    f"root {root!r}: the store is slow, and as many requests wait for it already "
                    f"as may ({self._at_once}; {self._share} of them {caller!r}'s). "
                    "What the catalog knows can be read meanwhile.",
                ) from exc
            yield

    @asynccontextmanager
    async def _place(self, name: tuple[str, ...], at_once: int) -> AsyncIterator[None]:
        # The first request creates a limiter and the last one removes it: clients choose the names,
        # and must not be able to fill the memory.
        line = self._lines.setdefault(name, _Line(asyncio.Semaphore(at_once)))
        line.people += 1
        try:
            async with line.turns:
                yield
        finally:
            line.people -= 1
            if line.people == 0:
                del self._lines[name]


@dataclass(eq=False)
class _Room:
    """Reservation of memory for an answer, granted or waiting."""

    owners: tuple[str, ...]
    nbytes: int
    turn: asyncio.Future[None]


class ValueMemory:
    """Limiter of the memory for answers made of values."""

    def __init__(self, most: int = VALUE_BYTES, share: int = VALUE_SHARE) -> None:
        """Allow `most` bytes, of which one owner gets `share` at most, or a single answer."""
        self._most, self._share = most, share
        self._waiting: list[_Room] = []
        self._all = 0
        self._taken = Counter[str]()

    @asynccontextmanager
    async def room(self, owners: tuple[str, ...], nbytes: int) -> AsyncIterator[None]:
        """Hold memory for one answer.

        Args:
            owners: Names that the memory counts for: the root, so that slow readers of one root
                leave memory to others, and the caller.
            nbytes: Size in bytes.

        Raises:
            NotReadyError: The memory did not come free in time.
        """
        turn = asyncio.get_running_loop().create_future()
        # An answer that needs more than the limit runs alone.
        room = _Room(owners, min(nbytes, self._most), turn)
        self._waiting.append(room)
        self._admit()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
            yield
        except TimeoutError as exc:
            # The memory was granted: the error is the block's own.
            if turn.done() and not turn.cancelled():
                raise
            raise NotReadyError(
                f"answers that are made of values have {self._most >> 20} MiB of memory, "
                f"{self._share >> 20} of them for {' and '.join(owners)} each, and it is in use. "
                "Ask again, or for one after another.",
            ) from exc
        finally:
            if room in self._waiting:
                self._waiting.remove(room)
            else:
                self._all -= room.nbytes
                self._taken -= Counter(dict.fromkeys(owners, room.nbytes))  # drops counts of 0
            self._admit()

    def _admit(self) -> None:
        """Grant memory to those that fit, in the order of their arrival."""
        for room in list(self._waiting):
            if room.turn.cancelled():  # its request ended or timed out, and removes itself next
                continue
            if self._all + room.nbytes > self._most:
                return  # else smaller answers would starve a large one
            own = max(self._taken[owner] for owner in room.owners)
            if not own or own + room.nbytes <= self._share:
                self._waiting.remove(room)
                self._all += room.nbytes
                self._taken.update(dict.fromkeys(room.owners, room.nbytes))
                room.turn.set_result(None)


class StoreRoute(PermittedRoute):
    """Route of a run: changes, and reads that need the store, wait for a turn of the root.

    A plain read waits for a turn at the catalog. If the catalog knows too little, the route goes on
    to the store: of many requests for a run that was just made, some scan the store, and the others
    find the result. A search may make the database read a whole list, so it has a limiter of its
    own.
    """

    needs_store: ClassVar[bool] = False
    searches: ClassVar[frozenset[str]] = frozenset({"filter", "order_by"})
    """Parameters that make the database read a whole list, if one of them is there."""

    def permitted_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with a turn and a deadline for its use of the store."""
        handler = super().permitted_handler()

        async def in_turn(request: Request) -> Response:
            with within(ANSWER_SECONDS):
                looks = request.query_params.get("refresh", "").lower() in _TRUE
                if request.method in _READS and not looks and not self.needs_store:
                    searches = not self.searches.isdisjoint(request.query_params)
                    state = request.app.state
                    known: CatalogTurns = state.search_turns if searches else state.catalog_turns
                    with suppress(StoreNeededError):
                        async with known.turn():
                            return await handler(request)
                turns: StoreTurns = request.app.state.turns
                root = request.path_params.get("root", "")
                caller = request.state.caller.name
                async with turns.turn(root, caller):
                    response = await handler(request)
                if response.background is not None:
                    left = response.background
                    response.background = BackgroundTask(_in_turn, turns, root, caller, left)
                return response

        return in_turn


async def _in_turn(turns: StoreTurns, root: str, caller: str, task: BackgroundTask) -> None:
    """Run a background task under a turn; skip it if no turn comes free in time."""
    with within(ANSWER_SECONDS), suppress(NotReadyError):
        async with turns.turn(root, caller):
            await task()


class StoreReadRoute(StoreRoute):
    """Route that reads data which only the store has."""

    needs_store: ClassVar[bool] = True
