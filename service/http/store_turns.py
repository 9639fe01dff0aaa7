"""Requests that need the store wait in a line of their own for each root, and not for ever.

A store that is slow or silent holds a few threads then, and the rest of the server goes on. No
caller has all turns of a root: who announces without end keeps nobody from promoting.
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
from cairn.storage.store import within

AT_ONCE: Final = 12
"""Requests of one root that the store works for at a time."""

SHARE: Final = 8
"""Of these, the most that are one caller's."""

WAIT_SECONDS: Final = 5.0
"""How long a request waits for its turn."""

STREAMS_AT_ONCE: Final = 8
"""Long answers that are made of the values of one root at a time."""

STREAMS_SHARE: Final = 4
"""Of these, the most that are one caller's."""

VALUE_BYTES: Final = 1 << 30
"""Memory of all answers that are made of values, of all roots together. Most need 104 MiB; the
larger the chunks, the more, and the fewer such answers there are at a time."""

VALUE_SHARE: Final = 512 << 20
"""Of these, the most that are one caller's, but for one answer that needs more by itself."""

ANSWER_SECONDS: Final = 30.0
"""How long the store may take for all that one request needs."""

_READS: Final = frozenset({"GET", "HEAD"})
_TRUE: Final = frozenset({"1", "true", "on", "yes", "t", "y"})


@dataclass
class _Line:
    """Who has a turn, and who waits for one."""

    turns: asyncio.Semaphore
    people: int = 0


class StoreTurns:
    """The lines: one for each root, and before it one for each of its callers."""

    def __init__(self, at_once: int = AT_ONCE, share: int = SHARE) -> None:
        """With so many turns of each root, of which one caller has this share at most."""
        self._at_once, self._share = at_once, share
        self._lines: dict[tuple[str, ...], _Line] = {}

    @asynccontextmanager
    async def turn(self, root: str, caller: str) -> AsyncIterator[None]:
        """One of the turns of a root.

        Args:
            root: As it is asked for; there may be none of that name.
            caller: Who asks.

        Raises:
            NotReadyError: Others have had all of them for too long.
        """
        async with AsyncExitStack() as places:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
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
        # Made by who comes first and gone with who leaves last: names come from outside.
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
    """What an answer has of the memory, or waits for."""

    owners: tuple[str, ...]
    nbytes: int
    turn: asyncio.Future[None]


class ValueMemory:
    """Memory for answers that are made of values: who needs it waits until there is enough."""

    def __init__(self, most: int = VALUE_BYTES, share: int = VALUE_SHARE) -> None:
        """Of so many bytes, of which one owner has this share at most, or one answer."""
        self._most, self._share = most, share
        self._waiting: list[_Room] = []
        self._all = 0
        self._taken = Counter[str]()

    @asynccontextmanager
    async def room(self, owners: tuple[str, ...], nbytes: int) -> AsyncIterator[None]:
        """Memory for one answer.

        Args:
            owners: Whose it is: a root, whose slow readers leave others theirs; and who asks.
            nbytes: That it needs.

        Raises:
            NotReadyError: Others have had too much of it for too long.
        """
        turn = asyncio.get_running_loop().create_future()
        room = _Room(owners, min(nbytes, self._most), turn)
        self._waiting.append(room)
        self._admit()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
            yield
        except TimeoutError as exc:
            if turn.done() and not turn.cancelled():  # it was raised inside
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
                self._taken -= Counter(dict.fromkeys(owners, room.nbytes))  # keeps those above 0
            self._admit()

    def _admit(self) -> None:
        """Let those in for whom there is room, who came first first."""
        for room in list(self._waiting):
            if room.turn.cancelled():  # it has left, or its time is over, and removes itself next
                continue
            if self._all + room.nbytes > self._most:
                return  # else who needs much would wait for good
            own = max(self._taken[owner] for owner in room.owners)
            if not own or own + room.nbytes <= self._share:
                self._waiting.remove(room)
                self._all += room.nbytes
                self._taken.update(dict.fromkeys(room.owners, room.nbytes))
                room.turn.set_result(None)


class StoreRoute(PermittedRoute):
    """A route of a run: what changes it, or looks at the store, waits for its turn there.

    What only reads waits for a turn at the catalog, and goes on to the store if that knows too
    little: of many who ask for a run that was made just now, some look, and the others find it. Who
    searches a list has the database look at all of it, maybe, and waits in a line of its own.
    """

    needs_store: ClassVar[bool] = False
    searches: ClassVar[frozenset[str]] = frozenset({"filter", "order_by"})
    """Parameters of which one is enough for the database to look at all of a list."""

    def permitted_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of FastAPI, with a turn and a deadline for what it asks of the store."""
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
    """What is left to do after an answer waits for its turn too; it can be left undone."""
    with within(ANSWER_SECONDS), suppress(NotReadyError):
        async with turns.turn(root, caller):
            await task()


class StoreReadRoute(StoreRoute):
    """A route that reads from the store what no catalog has."""

    needs_store: ClassVar[bool] = True
