"""Route classes that hold a slot of a limiter while they answer."""

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, Final

from fastapi import Request, Response
from starlette.background import BackgroundTask

from cairn.service.errors import NotReadyError
from cairn.service.http.limiters import (
    ANSWER_SECONDS,
    CatalogLimiter,
    StoreLimiter,
    StoreNeededError,
)
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.storage.store.deadlines import deadline_after

_READS: Final = frozenset({"GET", "HEAD"})
_TRUE: Final = frozenset({"1", "true", "on", "yes", "t", "y"})


class StoreRoute(PermittedRoute):
    """Route of a run: changes, and reads that need the store, wait for a slot of the root.

    A plain read waits for a slot at the catalog. If the catalog knows too little, the route goes on
    to the store: of many requests for a run that was just made, some scan the store, and the others
    find the result. A search may make the database read a whole list, so it has a limiter of its
    own.
    """

    needs_store: ClassVar[bool] = False
    searches: ClassVar[frozenset[str]] = frozenset({"filter", "order_by"})
    """Parameters that make the database read a whole list, if one of them is there."""

    def permitted_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with a slot and a deadline for its use of the store."""
        handler = super().permitted_handler()

        async def in_slot(request: Request) -> Response:
            with deadline_after(ANSWER_SECONDS):
                looks = request.query_params.get("refresh", "").lower() in _TRUE
                if request.method in _READS and not looks and not self.needs_store:
                    searches = not self.searches.isdisjoint(request.query_params)
                    state = request.app.state
                    limiter: CatalogLimiter = (
                        state.search_limiter if searches else state.catalog_limiter
                    )
                    with suppress(StoreNeededError):
                        async with limiter.slot():
                            return await handler(request)
                store_limiter: StoreLimiter = request.app.state.store_limiter
                root = request.path_params.get("root", "")
                caller = request.state.caller.name
                async with store_limiter.slot(root, caller):
                    response = await handler(request)
                if response.background is not None:
                    task = response.background
                    response.background = BackgroundTask(
                        _in_slot, store_limiter, root, caller, task
                    )
                return response

        return in_slot


async def _in_slot(
    store_limiter: StoreLimiter, root: str, caller: str, task: BackgroundTask
) -> None:
    """Run a background task in a slot; skip it if no slot comes free in time."""
    with deadline_after(ANSWER_SECONDS), suppress(NotReadyError):
        async with store_limiter.slot(root, caller):
            await task()


class StoreReadRoute(StoreRoute):
    """Route that reads data which only the store has."""

    needs_store: ClassVar[bool] = True
