"""Entries of the audit trail. They cover all roots, so callers of some roots may not read them."""

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.audit import audit_events
from cairn.service.filters.search import Search
from cairn.service.schemas import AuditEvent


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
        found = audit_events(connection, search, after=after, limit=limit + 1)
    return found[:limit], len(found) > limit
