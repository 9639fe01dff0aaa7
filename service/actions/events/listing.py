"""What happened, in the order in which the catalog came to know of it."""

from cairn.service.access import Caller, Scope
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries
from cairn.service.schemas import Event, EventKind


def list_events(
    plane: ControlPlane,
    caller: Caller,
    *,
    after: int,
    limit: int,
    root: str | None,
    run: str | None,
    kind: EventKind | None,
) -> tuple[list[Event], bool]:
    """The next events; whether there are more.

    Args:
        plane: Where.
        caller: Who asks: of roots that they may not use, nothing is told.
        after: Id of the last one that is known already; 0: from the first.
        limit: At most so many.
        root: Only of this root; None: of all.
        run: Only of runs of this name; None: of all.
        kind: Only of this kind; None: of any.

    Raises:
        ForbiddenError: The caller may not use the root.
    """
    caller.require(Scope.READ, root)
    roots = caller.roots if root is None else [root]
    with plane.catalog.query() as connection:
        found = queries.events(
            connection, after=after, roots=roots, run=run, kind=kind, limit=limit + 1
        )
    return [Event.model_validate(one._asdict()) for one in found[:limit]], len(found) > limit
