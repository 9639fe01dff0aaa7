"""Operations, limited to the roots of a caller."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.search_queries import Key
from cairn.service.filters.expressions import AnyOf, Comparison, Path
from cairn.service.filters.search import Search
from cairn.service.jobs.errors import OperationNotFoundError
from cairn.service.schemas import Operation, OperationState
from cairn.storage.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

UNFINISHED: Final = AnyOf(
    tuple(
        Comparison(Path("state"), "=", state.value) for state in OperationState if not state.final
    )
)
"""Condition that an operation has not ended."""


def list_operations(
    plane: ControlPlane, caller: Caller, search: Search, *, after: Key, limit: int
) -> tuple[list[Operation], Key]:
    """Return the next operations of a search, and the sort key of the last one; (): no more.

    Args:
        plane: The control plane.
        caller: Caller of the request; operations of other roots are left out.
        search: Filter and order; newest first if it has no order.
        after: Sort key of the last operation that the client has; (): start with the first.
        limit: Largest number of operations.

    Raises:
        NotReadyError: Jobs were not launched.
    """
    return plane.jobs.list(search, roots=caller.roots, after=after, limit=limit)


def get_operation(plane: ControlPlane, caller: Caller, operation: str) -> Operation:
    """Return the current state of an operation.

    Raises:
        OperationNotFoundError: The caller's roots have no such operation.
    """
    status = plane.jobs.get(operation)
    if not _is_visible(caller, status):
        raise OperationNotFoundError(operation)
    return status


async def watch_operation(
    plane: ControlPlane, caller: Caller, operation: str
) -> AsyncGenerator[Operation | None]:
    """Yield an operation now and at every change, until it ends; yield None after a quiet time.

    Raises:
        OperationNotFoundError: See `get_operation`.
    """
    async with aclosing(plane.watching.states(operation)) as states:
        async for status in states:
            if status is not None and not _is_visible(caller, status):
                raise OperationNotFoundError(operation)
            yield status


def cancel_operation(plane: ControlPlane, caller: Caller, operation: str) -> Operation:
    """Cancel an operation, and refresh the run that it has changed.

    An operation that was cancelled before is returned as it is.

    Raises:
        OperationNotFoundError: See `get_operation`.
        OperationStateError: It has succeeded or failed.
    """
    status = get_operation(plane, caller, operation)
    with audited(plane, caller, "operation.cancel", **_place(status), operation=operation):
        cancelled = plane.jobs.cancel(operation)
    changed, root = plane.jobs.kinds[cancelled.kind].changed, str(cancelled.request.get("root"))
    uri = plane.roots.get(root)
    if changed is not None and uri is not None:  # a dead worker cannot refresh the run
        try:
            plane.index.refresh_runs({root: uri}, [(root, changed(cancelled.request))])
        except StoreUnavailableError as exc:  # the operation is cancelled nonetheless
            logger.warning("root %s: lists are behind until it is looked at: %s", root, exc)
    return cancelled


def resume_operation(plane: ControlPlane, caller: Caller, operation: str) -> Operation:
    """Run a failed or cancelled operation again.

    Raises:
        OperationNotFoundError: See `get_operation`.
        OperationStateError: It is under way, has succeeded, or has found damage.
    """
    status = get_operation(plane, caller, operation)
    with audited(plane, caller, "operation.resume", **_place(status), operation=operation):
        return plane.jobs.resume(operation)


def _is_visible(caller: Caller, operation: Operation) -> bool:
    """Return whether an operation is of a root that a caller may use."""
    return caller.sees(str(operation.request.get("root", "")))


def _place(operation: Operation) -> dict[str, str]:
    request = operation.request
    return {"root": str(request.get("root", "")), "run": str(request.get("run", ""))}
