"""Automations: policies that act when an alias has moved.

Every server follows the events. Each operation has an idempotency key made of the automation and
the move. So of many servers, and of one that died in between, only one starts it. An automation
moves no alias, so it triggers no other automation.
"""

import logging
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Final

from cairn.service.access.callers import Caller
from cairn.service.actions.convert import convert_checkpoint
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.policies import ActivePolicy, in_force
from cairn.service.actions.verify import verify_checkpoint
from cairn.service.catalog import queries
from cairn.service.catalog.events.automations import advance, forget, positions
from cairn.service.catalog.events.outbox import EventColumns
from cairn.service.errors import NotReadyError, ServiceError
from cairn.service.policies import Automation
from cairn.service.schemas import ConvertRequest, EventKind, Operation, Scope
from cairn.storage.errors import StepChangedError, StorageError, StoreUnavailableError
from cairn.storage.store.clock import utc_now

logger = logging.getLogger(__name__)

MAY_PASS: Final = (StoreUnavailableError, NotReadyError)
"""Errors that prevent a start now, but perhaps not the next time."""

_AT_ONCE: Final = 100

_FORGET_AFTER: Final = timedelta(hours=1)


def follow_moves(plane: ControlPlane) -> int:
    """Start the operations for moves since the last call, and return their number.

    If a store or database prevents a start, the move is tried again at the next call, and other
    automations go on. If an operation can never start, the reason is recorded.

    Raises:
        SQLAlchemyError: A database does not answer.
        StoreUnavailableError: A store does not answer.
        NotReadyError: Jobs were not launched.
    """
    automations = {active.key: active for active in in_force(plane, Automation)}
    started = 0
    silent: StoreUnavailableError | NotReadyError | None = None
    for name, position in positions(plane.catalog, automations).items():
        try:
            started += _start_for_moves(plane, automations[name], position)
        except MAY_PASS as exc:
            silent = exc
    if silent is not None:
        raise silent
    return started


def forget_removed(plane: ControlPlane) -> None:
    """Forget the positions of automations that roots no longer have.

    Nothing is forgotten while some root's automations are unknown.

    Raises:
        SQLAlchemyError: The catalog does not answer.
        StoreUnavailableError: A store does not answer.
    """
    roots = dict(plane.roots.items())
    by_root = [plane.policies.get(root, uri) for root, uri in roots.items()]
    if any(
        problem.kind in ("automation", "") for policies in by_root for problem in policies.problems
    ):
        return
    names = {stored.key for policies in by_root for stored in policies.policies}
    forget(plane.catalog, roots, names, utc_now() - _FORGET_AFTER)


def _start_for_moves(
    plane: ControlPlane, automation: ActivePolicy[Automation], position: int
) -> int:
    """Start the operations for the moves after a position, and return their number.

    If a root's store does not answer, moves in other roots go on, but the stored position stays.
    Later calls read the same moves again; idempotency keys prevent that an operation starts twice.

    Raises:
        StoreUnavailableError, NotReadyError: An operation could not be started now.
    """
    started, read = 0, position
    silent: dict[str, StoreUnavailableError | NotReadyError] = {}
    while True:
        with plane.catalog.query() as connection:
            moves = queries.events(
                connection, after=read, kind=EventKind.ALIAS_MOVED, limit=_AT_ONCE
            )
        for move in moves:
            operation, problem = _start_for_move(plane, automation, move, silent)
            outcome = {"operation": operation, "problem": problem}
            if not silent:
                if not advance(
                    plane.catalog, automation.key, before=read, after=move.id, **outcome
                ):
                    return started  # another server has moved the position, and goes on
                started += operation is not None
            read = move.id
        if len(moves) < _AT_ONCE:
            break
    for exc in silent.values():
        raise exc
    return started


def _start_for_move(
    plane: ControlPlane,
    automation: ActivePolicy[Automation],
    move: EventColumns,
    silent: dict[str, StoreUnavailableError | NotReadyError],
) -> tuple[str | None, str | None]:
    """Start the operation for a move; return its id, or the reason why none was started.

    Both are None if the move needs no operation, or if the start must be tried again later. In the
    latter case the move's root and the error are added to `silent`.
    """
    if not is_for_move(automation, move) or move.root not in plane.roots or move.root in silent:
        return None, None
    try:
        return _start(plane, automation, move).id, None
    except MAY_PASS as exc:
        silent[move.root] = exc
        return None, None
    except (StorageError, ServiceError) as exc:
        logger.warning("automation %s: %s: %s", automation.policy.name, move.run, exc)
        return None, str(exc)


def is_for_move(automation: ActivePolicy[Automation], move: EventColumns) -> bool:
    """Return whether an automation acts on a move of an alias."""
    alias = str(move.detail.get("alias"))
    return automation.is_for(move.root, move.run) and fnmatchcase(alias, automation.policy.alias)


def _start(
    plane: ControlPlane, automation: ActivePolicy[Automation], move: EventColumns
) -> Operation:
    """Start the operation for a move of an alias.

    Raises:
        StepChangedError: The listed step is not the one that the alias was moved to: it was saved
            again, or its run was deleted and created again.
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
    """
    by = Caller(name=automation.caller, scope=Scope.OPERATE)
    detail = move.detail
    # `sequence` and `moved` distinguish this move from all other moves of the alias.
    parts = [str(detail.get(name)) for name in ("alias", "sequence", "step", "moved")]
    key = "/".join([move.run, *parts])
    place = (move.root, move.run, int(detail["step"]))
    run = plane.run(move.root, move.run)
    listed = run.step(int(detail["step"]))
    if (listed.attempt, listed.manifest_digest) != (detail["attempt"], detail["manifest_digest"]):
        raise StepChangedError(
            "the step was saved anew after the alias was moved to it",
            path=run.step_uri(listed),
            expected=f"attempt {detail['attempt']}, manifest {detail['manifest_digest']}",
            found=f"attempt {listed.attempt}, manifest {listed.manifest_digest}",
            next_step="Promote the new one, if it is what you want.",
        )
    if automation.policy.action == "verify":
        return verify_checkpoint(plane, by, *place, idempotency_key=key)
    body = automation.policy.convert or ConvertRequest()
    return convert_checkpoint(plane, by, *place, body, idempotency_key=key)
