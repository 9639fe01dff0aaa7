"""Requests that need the store wait in a line of their own for each root, and not for ever.

A store that is slow or silent holds a few threads then, and the rest of the server goes on.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.background import BackgroundTask

from cairn.service.errors import NotReadyError
from cairn.storage.store import within

AT_ONCE: Final = 12
"""Requests of one root that the store works for at a time."""

WAIT_SECONDS: Final = 5.0
"""How long a request waits for its turn."""

ANSWER_SECONDS: Final = 30.0
"""How long the store may take for all that one request needs."""

_READS: Final = frozenset({"GET", "HEAD"})
_TRUE: Final = frozenset({"1", "true", "on", "yes", "t", "y"})


class StoreTurns:
    """The lines, one for each root."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(AT_ONCE)
        )

    @asynccontextmanager
    async def turn(self, root: str) -> AsyncIterator[None]:
        """One of the turns of a root.

        Raises:
            NotReadyError: Others have had all of them for too long.
        """
        line = self._lines[root]
        try:
            await asyncio.wait_for(line.acquire(), WAIT_SECONDS)
        except TimeoutError as exc:
            raise NotReadyError(
                f"root {root!r}: the store is slow, and {AT_ONCE} requests wait for it already. "
                "What the catalog knows can be read meanwhile.",
            ) from exc
        try:
            yield
        finally:
            line.release()


class StoreRoute(APIRoute):
    """A route of a run: what changes it, or looks at the store, waits for its turn."""

    needs_store: ClassVar[bool] = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of FastAPI, with a turn and a deadline for what it asks of the store."""
        handler = super().get_route_handler()

        async def in_turn(request: Request) -> Response:
            with within(ANSWER_SECONDS):
                looks = request.query_params.get("refresh", "").lower() in _TRUE
                if request.method in _READS and not looks and not self.needs_store:
                    return await handler(request)
                turns: StoreTurns = request.app.state.turns
                root = request.path_params.get("root", "")
                async with turns.turn(root):
                    response = await handler(request)
                if response.background is not None:
                    response.background = BackgroundTask(_in_turn, turns, root, response.background)
                return response

        return in_turn


async def _in_turn(turns: StoreTurns, root: str, task: BackgroundTask) -> None:
    """What is left to do after an answer waits for its turn too; it can be left undone."""
    with within(ANSWER_SECONDS), suppress(NotReadyError):
        async with turns.turn(root):
            await task()


class StoreReadRoute(StoreRoute):
    """A route that reads from the store what no catalog has."""

    needs_store: ClassVar[bool] = True
