"""What the audit trail tells. Who may use only some roots reads none of it: it has all of them."""

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import audit_events
from cairn.service.filters import Search
from cairn.service.schemas import AuditEvent


def list_audit_events(
    plane: ControlPlane, search: Search, *, after: tuple[int, ...], limit: int
) -> tuple[list[AuditEvent], bool]:
    """The next entries, newest first; whether there are more.

    Args:
        plane: Where.
        search: Which entries.
        after: Id of the last one that is known already; (): from the newest.
        limit: At most so many.
    """
    with plane.catalog.query() as connection:
        found = audit_events(connection, search, after=after, limit=limit + 1)
    return found[:limit], len(found) > limit
