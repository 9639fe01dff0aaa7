"""Detection of alias changes that other writers of the store made, around this control plane.

A change through the control plane has an audit entry before the store shows it. So a change without
an entry was made by somebody else, and gets an entry now, with outcome `outside`.
"""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cairn.service.catalog.models import AliasRow, AuditRow, RunRow, plain_actor
from cairn.service.schemas import LostRecord
from cairn.storage.runs.records.aliases import Alias
from cairn.storage.runs.records.layout import alias_file

OUTSIDE: Final = "outside"
OUTSIDE_KINDS: Final = ("alias.promote", "alias.delete")


class Position(NamedTuple):
    """Target and sequence number of an alias."""

    sequence: int
    step: int
    attempt: int
    manifest_digest: str | None

    @classmethod
    def of(cls, alias: AliasRow | Alias) -> "Position":
        """Return the position of an alias, from the store or from the catalog."""
        return cls(alias.sequence, alias.step, alias.attempt, alias.manifest_digest)


def is_move_explained(
    session: Session, run: RunRow, row: AliasRow, before: Position | None
) -> bool:
    """Return whether an audit entry explains the move that brought an alias to its position.

    An entry with outcome "failed" or without an outcome may have moved the alias nonetheless. It
    explains the move if it requested the same one, for the same caller. A refused entry moved
    nothing.

    Args:
        session: Session of the catalog.
        run: Run of the alias.
        row: Current row of the alias.
        before: Position before the move; None: the alias did not exist.
    """
    if before is not None and row.sequence <= before.sequence:
        return False  # overwritten or restored: a move always increments the sequence number
    if before is not None:
        since = before.sequence
    else:
        deletion = last_alias_deletion(session, run, row.alias)
        since = 0 if deletion is None else deletion.sequence or 0
    if row.sequence <= since:
        return False  # a deleted alias was restored
    again = before is None or row.sequence > before.sequence + 1  # created anew after a deletion
    for entry in _entries(session, run, "alias.promote", row.alias):
        detail = entry.detail
        if entry.outcome == "done":
            same = (detail.get("sequence"), detail.get("manifest_digest"))
            if same == (row.sequence, row.manifest_digest):
                return True
            continue
        expect = detail.get("expect")
        fits = again if expect is None else expect + 1 == row.sequence
        if fits and detail["step"] == row.step and entry.actor == plain_actor(row.by):
            return True
    return False


def is_move_recorded(session: Session, run: RunRow, row: AliasRow) -> bool:
    """Return whether the move to an alias's current position has an `outside` entry already."""
    noted = _entries(session, run, "alias.promote", row.alias, outcomes=(OUTSIDE,))
    return any(
        (entry.detail["sequence"], entry.detail["step"], entry.detail["manifest_digest"])
        == (row.sequence, row.step, row.manifest_digest)
        for entry in noted
    )


def is_deletion_explained(session: Session, run: RunRow, row: AliasRow) -> bool:
    """Return whether an audit entry explains the deletion of an alias, last seen as `row`."""
    entries = _entries(session, run, "alias.delete", row.alias)
    return any(entry.detail.get("expect") == row.sequence for entry in entries)


def record_move(session: Session, run: RunRow, row: AliasRow, before: int | None) -> None:
    """Add an `outside` entry for a move.

    Args:
        session: Session of the catalog, for writing.
        run: Run of the alias.
        row: Current row of the alias.
        before: Step that the alias named before; None: it did not exist.
    """
    detail = {
        "alias": row.alias,
        "step": row.step,
        "attempt": row.attempt,
        "manifest_digest": row.manifest_digest,
        "sequence": row.sequence,
        "reason": row.reason,
        "before": before,
    }
    session.add(_entry(run, "alias.promote", row.by, detail))


def record_deletion(session: Session, run: RunRow, row: AliasRow) -> None:
    """Add an `outside` entry for a deletion. Who deleted it is only in the alias's history."""
    detail = {
        "alias": row.alias,
        "before": row.step,
        "attempt": row.attempt,
        "sequence": row.sequence + 1,
    }
    session.add(_entry(run, "alias.delete", "", detail))


def count_outside(session: Session) -> dict[tuple[str, str], int]:
    """Count the changes around this control plane, by root and kind."""
    counted = (
        select(AuditRow.root, AuditRow.action, func.count())
        .where(AuditRow.outcome == OUTSIDE)
        .group_by(AuditRow.root, AuditRow.action)
    )
    return {(root, action): number for root, action, number in session.execute(counted)}


def last_alias_deletion(session: Session, run: RunRow, alias: str) -> LostRecord | None:
    """Return the last deletion of an alias in the audit trail of this run; None: there is none."""
    outcomes = (None, "done", "failed", OUTSIDE)
    entries = _entries(session, run, "alias.delete", alias, outcomes=outcomes, since=run.created)
    deletions = [entry for entry in entries if {"sequence", "attempt"} <= entry.detail.keys()]
    if not deletions:
        return None
    last = max(deletions, key=lambda entry: int(entry.detail["sequence"]))
    detail = last.detail
    return LostRecord(
        record=alias_file(alias),
        alias=alias,
        step=detail["step"] if "step" in detail else detail["before"],
        attempt=detail["attempt"],
        manifest_digest=detail.get("manifest_digest"),
        sequence=detail["sequence"],
        deleted=True,
        by=last.actor,
        reason="",
        at=last.at,
    )


class _Entry(NamedTuple):
    """Columns of an audit entry; attributes as of `AuditRow`."""

    outcome: str | None
    actor: str
    detail: dict[str, Any]
    at: datetime


def _entries(
    session: Session,
    run: RunRow,
    action: str,
    alias: str,
    *,
    outcomes: Collection[str | None] = (None, "done", "failed"),
    since: datetime | None = None,
) -> list[_Entry]:
    """Return the audit entries of an action on an alias.

    Args:
        session: Session of the catalog.
        run: Run of the alias.
        action: Action, such as `alias.promote`.
        alias: Name of the alias.
        outcomes: Outcomes of the entries to return; None stands for entries that were not
            completed.
        since: Time of the first entry to return; None: from the beginning.
    """
    query = select(AuditRow.outcome, AuditRow.actor, AuditRow.detail, AuditRow.at).where(
        AuditRow.root == run.root,
        AuditRow.run == run.name,
        AuditRow.action == action,
        AuditRow.detail["alias"].as_string() == alias,
    )
    if since is not None:
        query = query.where(AuditRow.at >= since)
    entries = (_Entry(*row) for row in session.execute(query))
    return [entry for entry in entries if entry.outcome in outcomes]


def _entry(run: RunRow, action: str, by: str, detail: dict[str, object]) -> AuditRow:
    now = datetime.now(UTC)
    return AuditRow(
        at=now,
        actor=by,
        action=action,
        root=run.root,
        run=run.name,
        detail=detail,
        outcome=OUTSIDE,
        completed=now,
    )
