"""Events, in the order in which the catalog noticed them."""

from cairn.service.access.callers import Caller, Scope
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.catalog.events.retention import pruned_events
from cairn.service.errors import EventsPrunedError
from cairn.service.schemas import Event, EventKind, EventList


def list_events(
    plane: ControlPlane,
    caller: Caller,
    *,
    after: int,
    limit: int,
    root: str | None,
    run: str | None,
    kind: EventKind | None,
) -> tuple[EventList, bool]:
    """Return the next events, and whether there are more.

    Args:
        plane: The control plane.
        caller: Caller of the request; events of other roots are left out.
        after: Id of the last event that the client has; 0: start with the first that is kept.
        limit: Largest number of events.
        root: Return only events of this root; None: of all.
        run: Return only events of runs of this name; None: of all.
        kind: Return only events of this kind; None: of all.

    Raises:
        ForbiddenError: The caller may not use the root.
        EventsPrunedError: Some events after `after` have been pruned.
    """
    caller.require(Scope.READ, root)
    roots = caller.roots if root is None else [root]
    with plane.catalog.query() as connection:
        newest = queries.newest_event(connection)  # read before the events, so that none is skipped
        events = queries.events(
            connection, after=after, roots=roots, run=run, kind=kind, limit=limit + 1
        )
        # Read after the events, so that a concurrent pruning shows.
        pruned = pruned_events(connection)
    if 0 < after < pruned:
        raise EventsPrunedError(
            f"Events up to {pruned} are deleted (CAIRN_EVENT_DAYS), so events after {after} are "
            f"not complete. Read the current state from the lists, then continue after {pruned}.",
            extra={"pruned": pruned},
        )
    more = len(events) > limit
    page = [Event.model_validate(event._asdict()) for event in events[:limit]]
    last = page[-1].id if page else 0
    return EventList(events=page, position=last if more else max(last, newest)), more
