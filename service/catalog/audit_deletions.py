"""The audit trail of what deletes: steps, what a policy does not keep, and garbage."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from service.catalog.engine import Catalog
from service.catalog.models import AuditRow
from storage.run import Run

logger = logging.getLogger(__name__)


def note_deletion(
    catalog: Catalog, action: str, *, root: str, run: Run, actor: str, detail: Mapping[str, Any]
) -> None:
    """Note what the store, or the job engine, has accepted.

    It has happened, whatever becomes of this note; so a failing database is logged, not raised.

    Args:
        catalog: Where to.
        action: Such as `checkpoint.delete`.
        root: Name of the run's root.
        run: The run.
        actor: Who asked.
        detail: What for.
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
            session.add(event)
    except SQLAlchemyError:
        logger.exception("%s: %s is not in the audit trail", run.uri, action)
