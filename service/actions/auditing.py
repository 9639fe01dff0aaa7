"""Nothing is changed without an entry in the audit trail: written before, completed after."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from cairn.service.access import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import AuditEntry
from cairn.service.http import problem_from


@contextmanager
def audited(
    plane: ControlPlane,
    caller: Caller,
    action: str,
    *,
    root: str = "",
    run: str = "",
    **detail: Any,
) -> Iterator[AuditEntry]:
    """Do the block's work under an entry, which tells then whether it was done.

    Args:
        plane: Whose audit trail.
        caller: Who asks.
        action: Such as `checkpoint.delete`.
        root: Name of the root that it is about.
        run: Name of the run that it is about.
        detail: What is asked for.

    Raises:
        SQLAlchemyError: The entry could not be written; nothing was done.
    """
    entry = AuditEntry.begin(
        plane.catalog,
        action,
        actor=caller.name,
        root=root,
        run=run,
        detail=detail,
        request_id=caller.request_id,
    )
    try:
        yield entry
    except Exception as exc:
        problem = problem_from(exc, instance="")
        refused = problem.status < HTTPStatus.INTERNAL_SERVER_ERROR
        entry.complete("refused" if refused else "failed", problem=problem.type)
        raise
    entry.complete()
