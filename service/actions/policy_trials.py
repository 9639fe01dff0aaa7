"""Trials of policies: what one would do now. Nothing is changed."""

from collections.abc import Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Final

from cairn.counts import count_text
from cairn.service.actions.automations import is_for_move
from cairn.service.actions.clean_up import plan_retention
from cairn.service.actions.gates import Candidate, GateSet, refusals_of
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.policies import ActivePolicy
from cairn.service.actions.schedules import runs_of
from cairn.service.catalog import queries
from cairn.service.policies import (
    Automation,
    Gate,
    Policy,
    PolicyEffect,
    PolicyTrial,
    Retention,
    Schedule,
)
from cairn.service.schemas import EventKind
from cairn.service.sizes import size_text
from cairn.storage.errors import StorageError, StoreUnavailableError
from cairn.storage.runs.run import Run
from cairn.storage.store.clock import utc_now

MAX_RUNS: Final = 100
"""Largest number of runs that a trial looks at."""

MAX_EFFECTS: Final = 200
"""Largest number of effects that a trial lists."""

MOVES: Final = 20
"""Last moves of aliases that the trial of an automation looks at."""

_DUE: Final = 3
_GLOB: Final = frozenset("*?[")


def try_policy(plane: ControlPlane, root: str, policy: Policy) -> PolicyTrial:
    """Return what a policy would do in a root now.

    Args:
        plane: The control plane.
        root: Name of the root.
        policy: The policy, which need not be set.

    Raises:
        UnknownRootError: There is no such root.
        StoreUnavailableError: The store does not answer.
    """
    uri = plane.root(root)
    active: ActivePolicy[Any] = ActivePolicy(policy)
    names = list(islice(runs_of(plane, active, root, uri), MAX_RUNS + 1))
    whole, names = len(names) <= MAX_RUNS, names[:MAX_RUNS]
    effects: list[PolicyEffect] = []
    count = nbytes = 0
    if isinstance(policy, Retention):
        effects, count, nbytes = _deleted(plane, root, names, policy)
    elif isinstance(policy, Gate):
        stored_runs = [Run(plane.place(root, name)) for name in names]
        refused = (effect for run in stored_runs for effect in _refused(run, root, policy))
        effects = list(islice(refused, MAX_EFFECTS + 1))
    elif isinstance(policy, Automation):
        effects = _moved(plane, root, policy)
    due: list[datetime] = []
    if isinstance(policy, Schedule | Retention):
        moment = utc_now()
        for _ in range(_DUE):
            moment = policy.due(moment, ahead=True)
            due.append(moment)
    return PolicyTrial(
        sentence=_outcome(policy, len(names), effects, count, nbytes),
        runs=len(names),
        whole=whole and len(effects) <= MAX_EFFECTS,
        due=due,
        delete_count=count,
        delete_bytes=nbytes,
        effects=effects[:MAX_EFFECTS],
    )


def _deleted(
    plane: ControlPlane, root: str, names: list[str], policy: Retention
) -> tuple[list[PolicyEffect], int, int]:
    """Return the steps that a retention policy would delete now, their number and their bytes."""
    effects, count, nbytes = [], 0, 0
    for name in names:
        try:
            plan = plan_retention(plane, root, name, policy.policy)
        except StoreUnavailableError:
            raise
        except StorageError as exc:  # such as a metric that no step of this run has
            effects.append(PolicyEffect(run=name, step=None, alias=None, detail=str(exc)))
            continue
        count += plan.delete_count
        nbytes += plan.delete_bytes
        deleted = (step for step in plan.decisions if not step.keep)
        effects += [
            PolicyEffect(
                run=name, step=step.step, alias=None, detail=f"delete, {size_text(step.bytes)}"
            )
            for step in islice(deleted, max(0, MAX_EFFECTS + 1 - len(effects)))
        ]
    return effects, count, nbytes


def _refused(run: Run, root: str, gate: Gate) -> Iterator[PolicyEffect]:
    """Yield the aliases' steps that a gate would refuse today, and the latest step if it is one."""
    try:
        aliases: dict[str, set[int]] = {
            alias.alias: {alias.step}
            for alias in run.aliases.judge()[0]
            if fnmatchcase(alias.alias, gate.alias)
        }
        if not aliases and not _GLOB & {*gate.alias}:
            aliases = {gate.alias: set()}
        latest = run.latest_step()
        for name, steps in aliases.items():
            for step in sorted(steps | ({latest} if latest is not None else set())):
                info = run.step(step)
                refusals = refusals_of(GateSet([gate]), Candidate(root, run, info, name, "", ""))
                if refusals:
                    detail = "; ".join(refusal["detail"] for refusal in refusals)
                    yield PolicyEffect(run=run.uri.name, step=step, alias=name, detail=detail)
    except StoreUnavailableError:
        raise
    except StorageError as exc:
        yield PolicyEffect(run=run.uri.name, step=None, alias=None, detail=str(exc))


def _moved(plane: ControlPlane, root: str, automation: Automation) -> list[PolicyEffect]:
    """Return what an automation would have started for the last moves of aliases, newest first."""
    with plane.catalog.query() as connection:
        moves = queries.last_events(connection, root, EventKind.ALIAS_MOVED, limit=MOVES)
    return [
        PolicyEffect(
            run=move.run,
            step=int(move.detail["step"]),
            alias=str(move.detail.get("alias")),
            detail=automation.action,
        )
        for move in moves
        if is_for_move(ActivePolicy(automation), move)
    ]


def _outcome(
    policy: Policy, runs: int, effects: list[PolicyEffect], count: int, nbytes: int
) -> str:
    of_runs = count_text(runs, "run")
    if isinstance(policy, Retention):
        return f"Would delete {count_text(count, 'step')}, {size_text(nbytes)}, of {of_runs}."
    if isinstance(policy, Schedule):
        verb = "verify" if policy.action == "verify" else "collect the garbage of"
        return f"Would {verb} {of_runs}."
    if isinstance(policy, Gate):
        refused = count_text(sum(effect.step is not None for effect in effects), "promotion")
        most = "at least " if len(effects) > MAX_EFFECTS else ""
        return f"Would refuse {most}{refused} today, of {of_runs}."
    return (
        f"Would have started {count_text(len(effects), 'operation')} ({policy.action}) for the "
        f"last {MOVES} moves of aliases."
    )
