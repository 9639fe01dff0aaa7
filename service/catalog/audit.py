"""The audit trail: what was asked of this control plane, by whom, and what became of it."""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import AuditRow

logger = logging.getLogger(__name__)

Outcome = Literal["done", "refused", "failed"]


class AuditEntry:
    """An entry of the trail: begun before what it tells of is done, completed after."""

    def __init__(self, catalog: Catalog, row: AuditRow) -> None:
        self._catalog = catalog
        self._row = row
        self._completed = False

    @classmethod
    def begin(
        cls,
        catalog: Catalog,
        action: str,
        *,
        actor: str,
        root: str,
        run: str,
        detail: Mapping[str, Any],
        request_id: str = "",
    ) -> "AuditEntry":
        """Write it.

        Args:
            catalog: Where to.
            action: Such as `checkpoint.delete`.
            actor: Who asks.
            root: Name of the root that it is about; empty: none in particular.
            run: Name of the run that it is about; empty: none in particular.
            detail: What is asked for.
            request_id: Of the request.

        Raises:
            SQLAlchemyError: It could not be written: then nothing may be done.
        """
        row = AuditRow(
            at=datetime.now(UTC),
            actor=actor,
            action=action,
            root=root,
            run=run,
            detail=dict(detail),
            request_id=request_id or None,
        )
        with catalog.write() as session:
            session.add(row)
        return cls(catalog, row)

    def complete(
        self,
        outcome: Outcome = "done",
        *,
        also: Callable[[Session], None] | None = None,
        **detail: Any,
    ) -> None:
        """Say what became of it; the first to say so counts.

        It has happened, whatever becomes of the note; so a failing database is logged, not raised.

        Args:
            outcome: "refused" if the request was at fault, "failed" if the service was.
            also: Writes more in the same transaction.
            detail: What is known now, beside what was asked for.
        """
        if self._completed:
            return
        self._completed = True
        row = self._row
        values = {
            "outcome": outcome,
            "completed": datetime.now(UTC),
            "detail": {**row.detail, **detail},
        }
        try:
            with self._catalog.write((row.root, row.run)) as session:
                session.execute(update(AuditRow).where(AuditRow.id == row.id).values(values))
                if also is not None:
                    also(session)
        except SQLAlchemyError:
            place = f"{row.root}/{row.run}"
            logger.exception("%s of %s: %s, which could not be noted", row.action, place, outcome)
