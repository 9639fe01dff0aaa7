"""Changes of aliases that went around this control plane: whoever writes the store can make them.

What goes through it has an entry in the audit trail before it is to be seen in the store, so what
has none was made by somebody else: it gets one now, as `outside`.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cairn.service.catalog.models import AliasRow, AuditRow

OUTSIDE: Final = "outside"
OUTSIDE_KINDS: Final = ("alias.promote", "alias.delete")


def is_asked_for(session: Session, root: str, run: str, row: AliasRow) -> bool:
    """Whether an entry asked for the move that brought an alias where it is.

    One that failed may have been made all the same; one that was refused was not.
    """
    for outcome, detail in _entries(session, root, run, "alias.promote", row.alias):
        if outcome == "done":
            same = (detail.get("sequence"), detail.get("manifest_digest"))
            if same == (row.sequence, row.manifest_digest):
                return True
        elif ((detail.get("expect") or 0) + 1, detail["step"]) == (row.sequence, row.step):
            return True
    return False


def is_deletion_asked_for(session: Session, root: str, run: str, row: AliasRow) -> bool:
    """Whether an entry asked for the deletion of an alias that was last seen as `row`."""
    found = _entries(session, root, run, "alias.delete", row.alias)
    return any(detail.get("expect") == row.sequence for _, detail in found)


def note_move(session: Session, root: str, run: str, row: AliasRow, before: int | None) -> None:
    """Enter a move that nobody here asked for.

    Args:
        session: Of the catalog, for writing.
        root: Name of the run's root.
        run: Name of the run.
        row: The alias as it is now.
        before: The step that it named; None: it was not there.
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
    session.add(_entry(root, run, "alias.promote", row.by, detail))


def note_deletion(session: Session, root: str, run: str, row: AliasRow) -> None:
    """Enter a deletion that nobody here asked for; who did is in the alias's history only."""
    detail = {"alias": row.alias, "before": row.step, "sequence": row.sequence + 1}
    session.add(_entry(root, run, "alias.delete", "", detail))


def count_outside(session: Session) -> dict[tuple[str, str], int]:
    """How many such changes were noticed, by root and kind."""
    counted = (
        select(AuditRow.root, AuditRow.action, func.count())
        .where(AuditRow.outcome == OUTSIDE)
        .group_by(AuditRow.root, AuditRow.action)
    )
    return {(root, action): number for root, action, number in session.execute(counted)}


def _entries(
    session: Session, root: str, run: str, action: str, alias: str
) -> Iterable[tuple[str | None, dict[str, Any]]]:
    """Outcome and detail of what may have been made of an alias here."""
    asked = select(AuditRow.outcome, AuditRow.detail).where(
        AuditRow.root == root,
        AuditRow.run == run,
        AuditRow.action == action,
        AuditRow.detail["alias"].as_string() == alias,
        AuditRow.outcome.is_(None) | AuditRow.outcome.in_(("done", "failed")),
    )
    return ((outcome, detail) for outcome, detail in session.execute(asked))


def _entry(root: str, run: str, action: str, by: str, detail: dict[str, object]) -> AuditRow:
    now = datetime.now(UTC)
    return AuditRow(
        at=now,
        actor=by,
        action=action,
        root=root,
        run=run,
        detail=detail,
        outcome=OUTSIDE,
        completed=now,
    )
