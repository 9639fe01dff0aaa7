"""Resolution of references to steps: by number, alias or metric."""

import logging
import os
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Final

from cairn.storage.errors import CorruptionError, PolicyError, StepNotFoundError
from cairn.storage.runs.damage import (
    OnDamage,
    damage_of,
    known_damage,
    newest_sound,
    step_address,
    step_damaged,
)
from cairn.storage.runs.history import StepKey
from cairn.storage.runs.records.annotations import Better, Damage
from cairn.storage.runs.records.layout import CheckpointRef, manifest_file, parse_ref
from cairn.storage.runs.retention import StepFacts, metric_directions, ranked, step_facts
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store.uri import StoreURI

logger = logging.getLogger("cairn.restore")

__all__ = ["best_step", "resolve_checkpoint", "resolve_step"]

_MODES: Final[tuple[Better, ...]] = ("min", "max")


def resolve_checkpoint(
    text: StoreURI | str | os.PathLike[str], *, damaged: OnDamage | None = "refuse"
) -> tuple[Run, StepInfo]:
    """Return the run and the step that a reference names, see `parse_ref`.

    Args:
        text: the reference.
        damaged: what to do if damage is noted for the latest or best step: "refuse" it, "skip" it
            for a sound one, or None: use it. A step that a number or an alias names is never
            skipped.

    Raises:
        InvalidURIError: the text is malformed.
        RunNotFoundError: there is no such run.
        AliasNotFoundError: there is no such alias.
        StepNotFoundError: there is no such step.
        StepInFlightError: the step is being written now.
        StepDamagedError: the step is damaged and refused, or no other is sound.
        PolicyError: the best step by a metric is requested whose direction is unknown.
    """
    ref = parse_ref(text)
    run = Run.open(ref.run)
    return run, resolve_step(run, ref, damaged=damaged)


def resolve_step(run: Run, ref: CheckpointRef, *, damaged: OnDamage | None = "refuse") -> StepInfo:
    """Return the step that `ref` names.

    A step that a number or an alias names is returned even if it is damaged; for an alias a warning
    is logged. The step of an alias may be superseded.

    Args:
        run: the run.
        ref: the reference.
        damaged: what to do if the latest step, or the best, is damaged; see `resolve_checkpoint`.

    Raises:
        AliasNotFoundError: there is no such alias.
        StepNotFoundError: there is no such step, or no step at all.
        StepInFlightError: the step is being written now.
        StepDamagedError: the latest or best step is damaged and refused; the message names a sound
            step to use instead, if there is one.
        PolicyError: the best step by a metric is requested whose direction is unknown.
    """
    if ref.step is not None:
        return run.step(ref.step)
    if ref.alias is not None:
        return _aliased(run, ref.alias)
    if ref.best is None:
        return _latest(run, damaged)
    for mode in _MODES:
        if ref.best.endswith(f":{mode}"):
            return best_step(run, ref.best.removesuffix(f":{mode}"), mode, damaged=damaged)
    return best_step(run, ref.best, None, damaged=damaged)


def best_step(
    run: Run, metric: str, mode: Better | None, *, damaged: OnDamage | None = "refuse"
) -> StepInfo:
    """Return the listed step with the best value of a metric; the latest of equal ones.

    Args:
        run: the run.
        metric: name of the metric; steps without it, or with NaN, are never the best.
        mode: "min" if lower is better, such as for a loss; "max" if higher is; None: the direction
            that the steps' annotations have.
        damaged: what to do if the best step is damaged: "refuse" it, "skip" it for the best sound
            step, or None: use it.

    Raises:
        PolicyError: `mode` has another value or contradicts the annotations, or it is None and the
            annotations have no direction.
        StepNotFoundError: no listed step has a value of this metric; the message names the metrics
            that steps have.
        StepDamagedError: the best step is damaged and refused, or no other is sound.
        UnsupportedFormatError, CorruptionError: a manifest or an annotation can't be read.
    """
    steps = {(info.step, info.attempt): info for info in run.steps()}
    facts = step_facts(run, steps.values())
    best = ranked(facts, metric, _better(run, metric, mode, metric_directions(facts, metric)))
    if not best:
        raise _no_value(run, metric, facts)
    broken = {step.key for step in facts if step.damaged}
    if damaged is None or best[0] not in broken:
        return steps[best[0]]
    sound = next((key for key in best if key not in broken), None)
    if sound is None or damaged != "skip":
        damage = damage_of(run, best[0])
        if damage is None:  # the damage was removed just now
            return steps[best[0]]
        raise step_damaged(
            run, best[0], damage, next_step=_instead(run, f"best sound step by {metric!r}", sound)
        )
    _log_skipped(run, best[0], sound)
    return steps[sound]


def _latest(run: Run, damaged: OnDamage | None) -> StepInfo:
    """Return the latest listed step, or the newest sound one."""
    history = run.history()
    latest = history.latest()
    if latest is None:
        raise StepNotFoundError(
            "the run has no complete step",
            path=run.uri,
            expected="at least one saved step",
            found="none",
            next_step="Wait for the first save, or check the run's name.",
        )
    if damaged is None:
        return run.describe(latest)
    info, damage = _noted(run, latest, lambda: run.describe(latest))
    if damage is None:
        return info
    sound = newest_sound(run, history)
    if sound is None or damaged != "skip":
        raise step_damaged(run, latest, damage, next_step=_instead(run, "newest sound step", sound))
    _log_skipped(run, latest, sound)
    return run.describe(sound)


def _aliased(run: Run, name: str) -> StepInfo:
    alias = run.aliases.require(name)
    key = alias.step, alias.attempt
    info, damage = _noted(run, key, lambda: run.describe(key, run.state_of(*key)))
    if alias.manifest_digest not in (None, info.manifest_digest):
        raise CorruptionError(
            "the alias points to another manifest",
            path=run.uri / manifest_file(*key),
            expected=alias.manifest_digest,
            found=info.manifest_digest,
            next_step="Manifests never change: restore the object from a backup.",
        )
    if damage is not None:
        logger.warning("%s@%s is loaded although it is damaged: %s", run.uri, name, damage.text())
    return info


def _noted(
    run: Run, key: StepKey, describe: Callable[[], StepInfo]
) -> tuple[StepInfo, Damage | None]:
    """Return a step's description and its damage, read in one round of requests."""
    info, damage = run.objects.gather(describe, lambda: known_damage(run, key))
    return info, damage


def _instead(run: Run, what: str, sound: StepKey | None) -> str:
    """Return the advice which step to load in place of a damaged one."""
    if sound is None:
        return "No other step is sound: restore its files from a backup and verify it again."
    return (
        f"The {what} is {step_address(run, sound)}: load that, as damaged='skip' does where a load "
        "takes it; or restore the files from a backup and verify the step again."
    )


def _log_skipped(run: Run, damaged: StepKey, sound: StepKey) -> None:
    logger.warning(
        "%s is damaged: %s is taken", step_address(run, damaged), step_address(run, sound)
    )


def _better(run: Run, metric: str, mode: Better | None, noted: Collection[Better]) -> Better:
    said = " and ".join(map(repr, sorted(noted)))
    if len(noted) > 1 or (noted and mode is not None and mode not in noted):
        raise PolicyError(
            "steps say otherwise which values of a metric are good",
            path=f"{run.uri}@best:{metric}",
            expected="one direction" if mode is None else repr(mode),
            found=said,
            next_step="Ask for the best as the steps say, or correct what they say: "
            "`cairn annotate`.",
        )
    if mode is None and noted:
        return next(iter(noted))
    if mode not in ("min", "max"):
        raise PolicyError(
            "whether small or large values are good is not said",
            path=f"best:{metric}",
            expected="'min' or 'max'",
            found=repr(mode),
            next_step=f"Ask for best:{metric}:min or best:{metric}:max, or record it once: "
            f"`cairn annotate RUN --better {metric}=min`.",
        )
    return mode


def _no_value(run: Run, metric: str, facts: Iterable[StepFacts]) -> StepNotFoundError:
    names = sorted({name for step in facts for name in step.metrics})
    near = get_close_matches(metric, names, n=1)
    return StepNotFoundError(
        "no step has a value of this metric",
        path=run.uri,
        expected=f"a listed step with a number as {metric!r}",
        found=f"steps with {', '.join(map(repr, names))}" if names else "steps without metrics",
        next_step=f"Did you mean {near[0]!r}?"
        if near
        else "Give one of these, or the number of a step.",
    )
