"""Audit trail: entries of changes, begun before each change and completed after it.

Entries concern all roots, so callers that are limited to some roots may not list them.
"""

from contextlib import AbstractContextManager
from typing import Any

from cairn.service.access.callers import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import audit
from cairn.service.catalog.audit import AuditEntry, audit_events
from cairn.service.filters.search import Search
from cairn.service.schemas import AuditEvent


def audited(
    plane: ControlPlane,
    caller: Caller,
    action: str,
    *,
    root: str = "",
    run: str = "",
    **detail: Any,
) -> AbstractContextManager[AuditEntry]:
    """Run a block under an audit entry, and record its outcome.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        action: Action, such as `checkpoint.delete`.
        root: Name of the root that the action is about.
        run: Name of the run that the action is about.
        detail: Details of the request.

    Raises:
        SQLAlchemyError: The entry could not be written, and the block was not run.
    """
    return audit.audited(
        plane.catalog,
        action,
        actor=caller.name,
        root=root,
        run=run,
        detail=detail,
        request_id=caller.request_id,
    )


def list_audit_events(
    plane: ControlPlane, search: Search, *, after: tuple[int, ...], limit: int
) -> tuple[list[AuditEvent], bool]:
    """Return the next entries, newest first, and whether there are more.

    Args:
        plane: The control plane.
        search: Filter and order.
        after: Sort key of the last entry that the client has; (): start with the newest.
        limit: Largest number of entries.
    """
    with plane.catalog.query() as connection:
        entries = audit_events(connection, search, after=after, limit=limit + 1)
    return entries[:limit], len(entries) > limit
