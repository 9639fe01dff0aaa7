"""What retention would free of runs, from the catalog alone: as a preview decides, and no slower.

A preview asks the store, of one run. This is for lists: what the catalog has is decided upon by the
same rules, and kept until the run's rows change.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import outlooks
from cairn.service.catalog.outlooks import KnownStep, Version
from cairn.service.jobs import stored_policy
from cairn.service.schemas import RetentionPolicy, Run, ScheduledAction
from cairn.storage.runs import decide
from cairn.storage.store import utc_now

_HOUR: Final = 3600


@dataclass(frozen=True)
class Reclaimable:
    """What retention would free of a run.

    Attributes:
        nbytes: Up to so many; None: records of the run are damaged, and nobody can say.
        schedules: Names of the schedules whose policies it is; none: it is the policy asked about.
    """

    nbytes: int | None
    schedules: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """A run as it is now, and by which policies; another wherever something else is found.

    Attributes:
        run: Its id.
        revision: Of its rows.
        texts: The policies, each as JSON.
        hour: Where a policy asks for the time.
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
    """What each of some runs would lose by its schedules' policies.

    Args:
        plane: Where.
        runs: Of the catalog.
        otherwise: The policy for those that no schedule is for.

    Raises:
        PolicyError: The policy can't act.
    """
    now = utc_now()
    schedules = [_schedules_for(plane, run) for run in runs]
    with plane.catalog.query() as connection:
        versions = outlooks.versions(connection, {(run.root, run.name) for run in runs})
        asked = {
            (run.root, run.name): _Asked.of(version, [*named.values()] or [otherwise], now)
            for run, named in zip(runs, schedules, strict=True)
            if not run.problems and (version := versions.get((run.root, run.name))) is not None
        }
        known = {one: plane.reclaimable.peek(one) for one in asked.values()}
        new = {one.run: one for one, nbytes in known.items() if nbytes is None}
        notes = any(policy.names_notes for policy in new.values())
        steps = outlooks.known_steps(connection, new, with_notes=notes)
        aliases = outlooks.alias_targets(connection, new)
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
    """Bytes of the steps that some policy does not keep; pure.

    Args:
        steps: Every listed one.
        policies: Each deletes by itself.
        aliases: (step, attempt) that each alias names.
        now: The present moment.

    Raises:
        PolicyError: A policy can't act.
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
