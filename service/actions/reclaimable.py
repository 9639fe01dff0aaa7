"""Bytes that retention would free, from the catalog alone.

A preview of retention reads the store, for one run. For lists, this applies the same rules to the
catalog's rows, and caches the result until the run's rows change.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import run_health
from cairn.service.catalog.run_health import KnownStep, Version
from cairn.service.jobs.policies import stored_policy
from cairn.service.schemas import RetentionPolicy, Run, ScheduledAction
from cairn.storage.runs.retention import decide
from cairn.storage.store.clock import utc_now

_HOUR: Final = 3600


@dataclass(frozen=True)
class Reclaimable:
    """Bytes that retention would free in a run.

    Attributes:
        nbytes: Upper bound; None: unknown, since records of the run are damaged.
        schedules: Names of the schedules whose policies apply; empty: the requested policy applies.
    """

    nbytes: int | None
    schedules: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """Cache key: version of a run's rows, and policies.

    Attributes:
        run: Id of the run.
        revision: Revision of its rows.
        texts: Policies, each as JSON.
        hour: Current hour, if a policy depends on the time; else 0.
    """

    run: int
    revision: int
    texts: tuple[str, ...]
    hour: int

    @classmethod
    def of(cls, version: Version, policies: Collection[RetentionPolicy], now: datetime) -> "_Asked":
        timed = any(policy.keep_within_seconds is not None for policy in policies)
        hour = int(now.timestamp()) // _HOUR if timed else 0
        texts = tuple(policy.model_dump_json() for policy in policies)
        return cls(version.id, version.revision, texts, hour)

    @property
    def policies(self) -> list[RetentionPolicy]:
        return list(map(RetentionPolicy.model_validate_json, self.texts))

    @property
    def names_notes(self) -> bool:
        return any(one.keep_best or one.keep_labelled for one in self.policies)


def reclaimable(
    plane: ControlPlane, runs: Sequence[Run], otherwise: RetentionPolicy
) -> list[Reclaimable]:
    """Return the reclaimable bytes of some runs, by the policies of their schedules.

    Args:
        plane: The control plane.
        runs: Runs of the catalog.
        otherwise: Policy for runs without a schedule.

    Raises:
        PolicyError: The policy is invalid.
    """
    now = utc_now()
    schedules = [_schedules_for(plane, run) for run in runs]
    with plane.catalog.query() as connection:
        versions = run_health.versions(connection, {(run.root, run.name) for run in runs})
        asked = {
            (run.root, run.name): _Asked.of(version, [*named.values()] or [otherwise], now)
            for run, named in zip(runs, schedules, strict=True)
            if not run.problems and (version := versions.get((run.root, run.name))) is not None
        }
        known = {one: plane.reclaimable.peek(one) for one in asked.values()}
        new = {one.run: one for one, nbytes in known.items() if nbytes is None}
        notes = any(policy.names_notes for policy in new.values())
        steps = run_health.known_steps(connection, new, with_notes=notes)
        aliases = run_health.alias_targets(connection, new)
    for run, one in new.items():
        find = partial(freed, steps.get(run, []), one.policies, aliases.get(run, {}), now=now)
        known[one] = plane.reclaimable.get(one, find)
    sizes = {run: known[one] for run, one in asked.items()}
    return [
        Reclaimable(sizes.get((run.root, run.name)), tuple(named))
        for run, named in zip(runs, schedules, strict=True)
    ]


def freed(
    steps: Collection[KnownStep],
    policies: Collection[RetentionPolicy],
    aliases: Mapping[str, tuple[int, int]],
    *,
    now: datetime,
) -> int:
    """Sum the bytes of the steps that at least one policy deletes; pure.

    Args:
        steps: All listed steps.
        policies: Policies, each of which deletes by itself.
        aliases: (step, attempt) that each alias names.
        now: Current time.

    Raises:
        PolicyError: A policy is invalid.
    """
    facts = [one.facts for one in steps]
    going = {
        (one.step, one.attempt)
        for policy in policies
        for one in decide(facts, stored_policy(policy), now=now, aliases=aliases)
        if not one.keep
    }
    return sum(one.nbytes for one in steps if one.facts.key in going)


def _schedules_for(plane: ControlPlane, run: Run) -> dict[str, RetentionPolicy]:
    return {
        one.name: one.policy
        for one in plane.settings.schedules
        if one.action is ScheduledAction.APPLY_RETENTION
        and one.policy is not None
        and one.is_for(run.root, run.name)
    }
