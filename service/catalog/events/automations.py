"""Positions of automations in the events of moved aliases; compare-and-swap moves them."""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import AutomationRow, EventRow
from cairn.storage.store.clock import utc_now

_LONGEST: Final = 2000  # characters of a stored problem


def positions(catalog: Catalog, names: Iterable[str]) -> dict[str, int]:
    """Return the event id that each automation has reached; a new one starts at the newest."""
    automations = list(names)
    with catalog.query() as connection:
        positions = _positions(connection, automations)
    for name in automations:
        if name not in positions:
            positions[name] = _begin(catalog, name)
    return positions


def advance(
    catalog: Catalog,
    name: str,
    *,
    before: int,
    after: int,
    operation: str | None = None,
    problem: str | None = None,
) -> bool:
    """Move an automation's position by compare-and-swap; return whether this call did it.

    Args:
        catalog: Catalog with the positions.
        name: Name of the automation.
        before: Expected position.
        after: New position.
        operation: Operation that the automation started; None: it started nothing, and the last one
            stays recorded.
        problem: Reason why it could not start one.
    """
    outcome: dict[str, str | None] = {}
    if operation is not None or problem is not None:
        outcome = {"operation": operation, "problem": problem and problem[:_LONGEST]}
    moved = (
        update(AutomationRow)
        .where(AutomationRow.name == name, AutomationRow.position == before)
        .values(position=after, at=utc_now(), **outcome)
    )
    with catalog.connect() as connection:
        return bool(connection.execute(moved).rowcount)


def forget(
    catalog: Catalog, roots: Collection[str], automations: Collection[str], before: datetime
) -> None:
    """Delete the rows of roots' automations that are gone, so that no events are kept for them.

    Args:
        catalog: Catalog with the positions.
        roots: Names of the roots whose automations are known.
        automations: Names of those that there are.
        before: Rows that changed later stay: their automations may be newer than the list.
    """
    is_old = AutomationRow.name.contains("/"), AutomationRow.at < before
    with catalog.query() as connection:
        names = connection.scalars(select(AutomationRow.name).where(*is_old)).all()
    gone = [name for name in names if name not in automations and name.partition("/")[0] in roots]
    if gone:
        with catalog.connect() as connection:
            connection.execute(delete(AutomationRow).where(AutomationRow.name.in_(gone), *is_old))


def states(catalog: Catalog) -> dict[str, AutomationRow]:
    """Return the stored row of each automation, by name."""
    with catalog.read() as session:
        return {row.name: row for row in session.scalars(select(AutomationRow))}


def _positions(connection: Connection, names: Iterable[str]) -> dict[str, int]:
    query = select(AutomationRow.name, AutomationRow.position)
    rows = connection.execute(query.where(AutomationRow.name.in_(list(names))))
    return {row.name: row.position for row in rows}


def _begin(catalog: Catalog, name: str) -> int:
    last = select(func.coalesce(func.max(EventRow.id), 0))
    try:
        with catalog.connect() as connection:
            position = connection.scalar(last) or 0
            values = {"name": name, "position": position, "at": utc_now()}
            connection.execute(insert(AutomationRow).values(values))
            return position
    except IntegrityError:  # another server was faster
        with catalog.query() as connection:
            return _positions(connection, [name])[name]
