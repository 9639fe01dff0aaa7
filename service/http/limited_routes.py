"""Route classes that have a slot of a limiter while they answer."""

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
    """Route of a run. Changes, and reads that need the store, wait for a slot of the root.

    Other reads wait for a slot of the catalog. If the catalog lacks the answer, the route goes on
    to the store: of many requests for a run that was created just now, some scan the store, and the
    others then find the run in the catalog. A search may make the database read a whole list, so
    searches have a limiter of their own.
    """

    needs_store: ClassVar[bool] = False
    searches: ClassVar[frozenset[str]] = frozenset({"filter", "order_by"})
    """Parameters of searches, which may make the database read a whole list."""

    def permitted_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, wrapped in a slot and a deadline for the store's answers."""
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
    """Run a background task in a slot; skip the task if no slot becomes free in time."""
    with deadline_after(ANSWER_SECONDS), suppress(NotReadyError):
        async with store_limiter.slot(root, caller):
            await task()


class StoreReadRoute(StoreRoute):
    """Route that reads data which only the store has."""

    needs_store: ClassVar[bool] = True
