"""Bytes that retention would free, from the catalog alone.

A preview of retention reads the store, for one run. For lists, this applies the same rules to the
catalog's rows, and caches the result until the run's rows change.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.policies import ActivePolicy, in_force
from cairn.service.catalog import run_health
from cairn.service.catalog.run_health import SizedStep, Version
from cairn.service.jobs.policies import stored_policy
from cairn.service.policies import Retention
from cairn.service.schemas import RetentionPolicy, Run
from cairn.storage.runs.retention import evaluate_retention
from cairn.storage.store.clock import utc_now

_HOUR: Final = 3600


@dataclass(frozen=True)
class Reclaimable:
    """Bytes that retention would free in a run.

    Attributes:
        nbytes: Upper bound; None: unknown, since records of the run are damaged.
        policies: Names of the retention policies that apply; empty: the requested rules apply.
    """

    nbytes: int | None
    policies: tuple[str, ...] = ()


@dataclass(frozen=True)
class _CacheKey:
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
    def of(
        cls, version: Version, policies: Collection[RetentionPolicy], now: datetime
    ) -> "_CacheKey":
        timed = any(policy.keep_within_seconds is not None for policy in policies)
        hour = int(now.timestamp()) // _HOUR if timed else 0
        texts = tuple(policy.model_dump_json() for policy in policies)
        return cls(version.id, version.revision, texts, hour)

    @property
    def policies(self) -> list[RetentionPolicy]:
        return list(map(RetentionPolicy.model_validate_json, self.texts))

    @property
    def uses_notes(self) -> bool:
        return any(policy.keep_best or policy.keep_labelled for policy in self.policies)


def reclaimable(
    plane: ControlPlane, runs: Sequence[Run], otherwise: RetentionPolicy
) -> list[Reclaimable]:
    """Return the reclaimable bytes of each of some runs, by their retention policies.

    Args:
        plane: The control plane.
        runs: Runs of the catalog.
        otherwise: Rules for runs without a retention policy.

    Raises:
        PolicyError: The policy is invalid.
    """
    now = utc_now()
    retention = in_force(plane, Retention, max_age=None)
    policies = [_policies_for(retention, run) for run in runs]
    with plane.catalog.query() as connection:
        versions = run_health.run_versions(connection, {(run.root, run.name) for run in runs})
        keys = {
            (run.root, run.name): _CacheKey.of(version, [*named.values()] or [otherwise], now)
            for run, named in zip(runs, policies, strict=True)
            if not run.problems and (version := versions.get((run.root, run.name))) is not None
        }
        sizes_by_key = {key: plane.reclaimable.peek(key) for key in keys.values()}
        new = {key.run: key for key, nbytes in sizes_by_key.items() if nbytes is None}
        notes = any(policy.uses_notes for policy in new.values())
        steps = run_health.listed_steps(connection, new, with_notes=notes)
        aliases = run_health.alias_targets(connection, new)
    for run, key in new.items():
        find = partial(
            reclaimable_bytes, steps.get(run, []), key.policies, aliases.get(run, {}), now=now
        )
        sizes_by_key[key] = plane.reclaimable.get(key, find)
    sizes = {run: sizes_by_key[key] for run, key in keys.items()}
    return [
        Reclaimable(sizes.get((run.root, run.name)), tuple(named))
        for run, named in zip(runs, policies, strict=True)
    ]


def reclaimable_bytes(
    steps: Collection[SizedStep],
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
    facts = [step.facts for step in steps]
    deleted = {
        (decision.step, decision.attempt)
        for policy in policies
        for decision in evaluate_retention(facts, stored_policy(policy), now=now, aliases=aliases)
        if not decision.keep
    }
    return sum(step.nbytes for step in steps if step.facts.key in deleted)


def _policies_for(
    policies: Iterable[ActivePolicy[Retention]], run: Run
) -> dict[str, RetentionPolicy]:
    return {
        active.policy.name: active.policy.policy
        for active in policies
        if active.is_for(run.root, run.name)
    }
