"""What the settings have done once an alias has moved.

Every server follows the events. Each operation has a key made of the automation and the move: of
many servers, and of one that died in between, one starts it. What is done here moves no alias, so
no automation sets off another.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from cairn.service.access import Caller
from cairn.service.actions.exports import convert_checkpoint
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.verification import verify_checkpoint
from cairn.service.catalog import EventColumns, advance, positions, queries, states
from cairn.service.errors import NotReadyError, ServiceError
from cairn.service.schemas import (
    AutomatedAction,
    AutomationState,
    ConvertRequest,
    EventKind,
    Operation,
    Scope,
)
from cairn.service.settings import Automation
from cairn.storage.errors import StepChangedError, StorageError, StoreUnavailableError
from cairn.storage.runs import Run

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 100


def list_automations(plane: ControlPlane) -> list[AutomationState]:
    """Every automation, by name, and what came of it last."""
    known = states(plane.catalog) if plane.settings.automations else {}
    return [
        AutomationState(
            **one.model_dump(include={"name", "alias", "root", "run", "action"}),
            position=None if (row := known.get(one.name)) is None else row.position,
            operation=None if row is None else row.operation,
            problem=None if row is None else row.problem,
        )
        for one in sorted(plane.settings.automations, key=lambda one: one.name)
    ]


def follow_moves(plane: ControlPlane) -> int:
    """Start what the moves of aliases since the last time ask for; how many operations.

    What the store or a database keeps from being started now is tried again the next time; of what
    can't be started at all the reason is noted.

    Raises:
        SQLAlchemyError: A database does not answer.
        StoreUnavailableError: A store does not.
        NotReadyError: Jobs were not launched.
    """
    wanted = {one.name: one for one in plane.settings.automations}
    started = 0
    for name, position in positions(plane.catalog, wanted).items():
        started += _followed(plane, wanted[name], position)
    return started


def _followed(plane: ControlPlane, automation: Automation, position: int) -> int:
    started = 0
    while True:
        with plane.catalog.query() as connection:
            moves = queries.events(
                connection, after=position, kind=EventKind.ALIAS_MOVED, limit=_AT_ONCE
            )
        for move in moves:
            operation, problem = None, None
            alias = str(move.detail.get("alias"))
            wanted = automation.is_for_alias(move.root, move.run, alias)
            if wanted and move.root in plane.roots:
                try:
                    operation = _start(plane, automation, move).id
                    started += 1
                except (StoreUnavailableError, NotReadyError):
                    raise
                except (StorageError, ServiceError) as exc:
                    problem = str(exc)
                    logger.warning("automation %s: %s: %s", automation.name, move.run, exc)
            told = {"operation": operation, "problem": problem}
            if not advance(plane.catalog, automation.name, before=position, after=move.id, **told):
                return started  # another server goes on
            position = move.id
        if len(moves) < _AT_ONCE:
            return started


def _start(plane: ControlPlane, automation: Automation, move: EventColumns) -> Operation:
    by = Caller(name=f"automation:{automation.name}", scope=Scope.OPERATE)
    detail = move.detail
    made = "/".join(str(detail.get(name)) for name in ("alias", "sequence", "step", "moved"))
    key = f"automation/{automation.name}/{move.root}/{move.run}/{made}"
    place = (move.root, move.run, int(detail["step"]))
    _refuse_other(plane.run(move.root, move.run), detail)
    if automation.action is AutomatedAction.VERIFY:
        return verify_checkpoint(plane, by, *place, idempotency_key=key)
    wanted = automation.convert or ConvertRequest()
    return convert_checkpoint(plane, by, *place, wanted, idempotency_key=key)


def _refuse_other(run: Run, moved: Mapping[str, Any]) -> None:
    """Raise if the listed step is not the one that the alias was moved to.

    Raises:
        StepChangedError: It was saved anew, or its run was made anew.
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
    """
    listed = run.step(int(moved["step"]))
    if (listed.attempt, listed.manifest_digest) != (moved["attempt"], moved["manifest_digest"]):
        raise StepChangedError(
            "the step was saved anew after the alias was moved to it",
            path=run.step_uri(listed),
            expected=f"attempt {moved['attempt']}, manifest {moved['manifest_digest']}",
            found=f"attempt {listed.attempt}, manifest {listed.manifest_digest}",
            next_step="Promote the new one, if it is what you want.",
        )
