"""The audit trail: what was done through this control plane, by whom."""

import logging
from datetime import UTC, datetime

from sqlalchemy.exc import SQLAlchemyError

from cairn.service.catalog import rows
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import AuditRow
from cairn.storage.runs import Alias, Run

logger = logging.getLogger(__name__)


def note_alias(catalog: Catalog, *, root: str, run: Run, actor: str, alias: Alias) -> None:
    """Note a move or a deletion that the store has accepted.

    It has happened, whatever becomes of this note; so a failing database is logged, not raised.
    The next refresh brings the alias in, and the alias's own history has who and why.
    """
    action = "alias.delete" if alias.deleted else "alias.promote"
    event = AuditRow(
        at=datetime.now(UTC),
        actor=actor,
        action=action,
        root=root,
        run=run.uri.name,
        detail={
            "alias": alias.alias,
            "step": alias.step,
            "attempt": alias.attempt,
            "manifest_digest": alias.manifest_digest,
            "sequence": alias.sequence,
            "reason": alias.reason,
        },
    )
    try:
        with catalog.write((root, run.uri.name)) as session:
            session.add(event)
            row = rows.find_run(session, root, run.uri.name)
            if row is not None:
                rows.write_alias(session, row, alias)
    except SQLAlchemyError:
        logger.exception("%s: %s of %r is not in the audit trail", run.uri, action, alias.alias)
