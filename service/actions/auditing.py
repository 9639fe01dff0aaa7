"""Audit entries of changes: begun before the change, and completed after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from cairn.service.access.callers import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.audit import AuditEntry
from cairn.service.http.problems import problem_from


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
    """Run the block under an audit entry, and record its outcome.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        action: Action, such as `checkpoint.delete`.
        root: Name of the root that the action is about.
        run: Name of the run that the action is about.
        detail: Details of the request.

    Raises:
        SQLAlchemyError: The entry could not be written, and the block was not run.
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
