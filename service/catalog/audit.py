"""Audit trail: requests to this control plane, their callers and their outcomes."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, Literal

from sqlalchemy import Connection, bindparam, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import AuditRow
from cairn.service.catalog.search_queries import AUDIT, Key, searched_page
from cairn.service.filters.search import Search
from cairn.service.http.problems import problem_from
from cairn.service.schemas import AuditEvent

logger = logging.getLogger(__name__)

_BEGIN: Final = insert(AuditRow)
_COMPLETE: Final = update(AuditRow).where(AuditRow.id == bindparam("row"))
_EVENTS: Final = select(
    AuditRow.id,
    AuditRow.at,
    AuditRow.actor.label("caller"),
    AuditRow.action,
    AuditRow.root,
    AuditRow.run,
    AuditRow.detail,
    AuditRow.outcome,
    AuditRow.completed,
    AuditRow.request_id,
)
_MAYBE_NONE: Final = ("caller", "root", "run")

Outcome = Literal["done", "refused", "failed"]


class AuditEntry:
    """Entry of the audit trail, which begins before its action and is completed after."""

    def __init__(self, catalog: Catalog, row: int, values: Mapping[str, Any]) -> None:
        self._catalog = catalog
        self._row = row
        self._values = values
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
        """Write an entry without an outcome, before its action, and return it.

        Args:
            catalog: Catalog to write to.
            action: Action, such as `checkpoint.delete`.
            actor: Name of the caller.
            root: Name of the root that the action is about; empty: no particular root.
            run: Name of the run that the action is about; empty: no particular run.
            detail: Details of the request.
            request_id: Id of the request.

        Raises:
            SQLAlchemyError: The entry could not be written, so the action must not happen.
        """
        values = {
            "at": datetime.now(UTC),
            "actor": actor,
            "action": action,
            "root": root,
            "run": run,
            "detail": dict(detail),
            "request_id": request_id or None,
        }
        with catalog.connect() as connection:
            (row,) = connection.execute(_BEGIN, values).inserted_primary_key or (0,)
        return cls(catalog, row, values)

    def complete(
        self,
        outcome: Outcome = "done",
        *,
        also: Callable[[Connection], None] | None = None,
        **detail: Any,
    ) -> None:
        """Record the outcome; only the first call counts.

        The action has happened, whether this can be recorded or not. So an error of the database is
        logged, not raised.

        Args:
            outcome: "done"; "refused" if the request was at fault; "failed" if the service was.
            also: Function that writes more rows in the same transaction.
            detail: Details of the outcome, in addition to those of the request.
        """
        if self._completed:
            return
        self._completed = True
        begun = self._values
        values = {
            "outcome": outcome,
            "completed": datetime.now(UTC),
            "detail": {**begun["detail"], **detail},
        }
        try:
            with self._catalog.connect((begun["root"], begun["run"])) as connection:
                connection.execute(_COMPLETE, {"row": self._row, **values})
                if also is not None:
                    also(connection)
        except SQLAlchemyError:
            logger.exception(
                "%s of %s/%s: %s, which could not be noted",
                *(begun["action"], begun["root"], begun["run"], outcome),
            )


@contextmanager
def audited(
    catalog: Catalog,
    action: str,
    *,
    actor: str,
    root: str = "",
    run: str = "",
    detail: Mapping[str, Any],
    request_id: str = "",
) -> Iterator[AuditEntry]:
    """Run the block under an audit entry, and record its outcome.

    Args:
        catalog: Catalog to write to.
        action: Action, such as `checkpoint.delete`.
        actor: Name of the caller.
        root: Name of the root that the action is about; empty: no particular root.
        run: Name of the run that the action is about; empty: no particular run.
        detail: Details of the request.
        request_id: Id of the request.

    Raises:
        SQLAlchemyError: The entry could not be written, and the block was not run.
    """
    entry = AuditEntry.begin(
        catalog, action, actor=actor, root=root, run=run, detail=detail, request_id=request_id
    )
    try:
        yield entry
    except Exception as exc:
        problem = problem_from(exc, instance="")
        refused = problem.status < HTTPStatus.INTERNAL_SERVER_ERROR
        entry.complete("refused" if refused else "failed", problem=problem.type)
        raise
    entry.complete()


def audit_events(
    connection: Connection, search: Search, *, after: Key, limit: int
) -> list[AuditEvent]:
    """Return the next entries of a search, newest first.

    Args:
        connection: Connection to the catalog.
        search: Filter and order.
        after: Sort key of the last entry that the client has; (): start with the newest.
        limit: Largest number of entries.
    """
    dialect = connection.dialect.name
    page = searched_page(_EVENTS, AUDIT, search, after=after, limit=limit, dialect=dialect)
    events = []
    for row in connection.execute(page):
        fields = row._asdict()
        fields |= {name: fields[name] or None for name in _MAYBE_NONE}
        events.append(AuditEvent.model_validate(fields))
    return events


def last_entry(catalog: Catalog, actor: str, roots: Iterable[str]) -> AuditRow | None:
    """Return the newest entry of a caller about some roots; None: there is none."""
    newest = select(AuditRow).where(AuditRow.actor == actor, AuditRow.root.in_(list(roots)))
    with catalog.read() as session:
        return session.scalar(newest.order_by(AuditRow.id.desc()).limit(1))
