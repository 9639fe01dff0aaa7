"""The audit trail of what deletes: steps, what a policy does not keep, and garbage."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import AuditRow
from cairn.storage.runs import Run

logger = logging.getLogger(__name__)


def note_deletion(
    catalog: Catalog, action: str, *, root: str, run: Run, actor: str, detail: Mapping[str, Any]
) -> None:
    """Note what the store, or the job engine, has accepted.

    It has happened, whatever becomes of this note; so a failing database is logged, not raised.
    What an operation does is noted once, however often the request that started it comes.

    Args:
        catalog: Where to.
        action: Such as `checkpoint.delete`.
        root: Name of the run's root.
        run: The run.
        actor: Who asked.
        detail: What for; `operation` is the id of an operation.
    """
    event = AuditRow(
        at=datetime.now(UTC),
        actor=actor,
        action=action,
        root=root,
        run=run.uri.name,
        detail=dict(detail),
    )
    try:
        with catalog.write() as session:
            if "operation" in detail and _is_noted(session, event):
                return
            session.add(event)
    except SQLAlchemyError:
        logger.exception("%s: %s is not in the audit trail", run.uri, action)


def _is_noted(session: Session, event: AuditRow) -> bool:
    same = select(AuditRow.id).where(
        AuditRow.root == event.root,
        AuditRow.run == event.run,
        AuditRow.action == event.action,
        AuditRow.detail["operation"].as_string() == event.detail["operation"],
    )
    return session.scalars(same.limit(1)).first() is not None
