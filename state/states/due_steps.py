"""Decision which steps of a job to save, the same on all processes."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Final

import jax
import numpy as np

from cairn.interop.errors import ArgumentError
from cairn.state.checkpointing.processes import agreement, exchange
from cairn.state.checkpointing.save_policy import BestSoFar, DueReason, SaveFacts, SavePolicy
from cairn.storage.errors import RunNotFoundError
from cairn.storage.runs.retention import BestSteps, RetentionPolicy, check_names, step_facts
from cairn.storage.runs.run import Run
from cairn.storage.store.uri import StoreURI

__all__ = ["DueSteps", "votes"]

logger = logging.getLogger("cairn.save")

_REASONS: Final = (None, *DueReason)
_MISSPELT: Final = 0.8  # 1 is the same name


class DueSteps:
    """Applies a save policy to the steps of a job, one after the other.

    Rules on step numbers need no communication between processes. Rules on signals, time and
    metrics do: processes exchange these at the first step at or after each multiple of
    `agree_every`, and at each step that is due by its number.

    Args:
        uri: the run; its steps count for `policy.best`.
        policy: when to save.
        agree_every: number of steps between two exchanges.
        clock: returns the time in seconds.

    Attributes:
        previous: the step of the last call of `look`; None before the first.

    Raises:
        ArgumentError: `agree_every` is below 1.
        StorageError: `policy.best` is set, and the metrics of the run's steps can't be read.
        PolicyError: the metric of `policy.best` is a misspelt one of the run's steps, or these
            record another direction.
    """

    def __init__(
        self,
        uri: StoreURI,
        policy: SavePolicy,
        *,
        agree_every: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if agree_every < 1:
            raise ArgumentError(path="agree_every", expected="1 or more", found=agree_every)
        self.previous: int | None = None
        self._policy = policy
        self._agree_every = agree_every
        self._clock = clock
        self._began = clock()
        self._many = jax.process_count() > 1
        self._is_name_known = False
        self._best = (
            None if policy.best is None else BestSoFar(policy.best, _stored(uri, policy.best))
        )

    def look(
        self, step: int, metrics: Mapping[str, float], *, preempted: bool, busy: bool
    ) -> tuple[DueReason | None, bool]:
        """Return the reason to save a step (None: don't), and whether a process is still saving.

        All processes must call this. If they exchange nothing at this step, the result is
        (None, False).

        Args:
            step: the step's number.
            metrics: the step's metrics, by name.
            preempted: whether this process was signalled to end.
            busy: whether this process has a save under way.
        """
        self._warn_of_misspelt(step, metrics)
        facts = SaveFacts(
            step=step,
            previous=self.previous,
            seconds=self._clock() - self._began,
            metrics=metrics,
            best=() if self._best is None else self._best.values,
            preempted=preempted,
        )
        self.previous = step
        if not self._many:
            return self._policy.due(facts), busy
        by_number = self._policy.due_by_number(facts.step, facts.previous)
        if by_number is None and not self._agrees_at(facts):
            return None, False
        said = votes(preempted, busy, _REASONS.index(self._policy.due(facts)))
        reason = DueReason.PREEMPTION if said[:, 0].any() else _REASONS[int(said[0, 2])]
        return reason, bool(said[:, 1].any())

    def begin(self) -> None:
        """Restart the time of `every_minutes`: a save begins now, for whatever reason."""
        self._began = self._clock()

    def saved(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step that is now durable to the best so far, for `policy.best`."""
        if self._best is not None:
            self._best.add(metrics)

    def _warn_of_misspelt(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn once if the metric of `policy.best` is probably a misspelt one of the step's."""
        best = self._policy.best
        if best is None or self._is_name_known or not metrics:
            return
        near = get_close_matches(best.metric, metrics, n=1, cutoff=_MISSPELT)
        self._is_name_known = best.metric in metrics or bool(near)
        if best.metric not in metrics and near and exchange.is_primary():
            logger.warning(
                "The policy saves the best by %r, which step %d does not have. Did you mean %r?",
                best.metric,
                step,
                near[0],
            )

    def _agrees_at(self, facts: SaveFacts) -> bool:
        policy = self._policy
        if not (policy.on_preemption or policy.every_minutes or policy.best):
            return False
        before = facts.step - 1 if facts.previous is None else facts.previous
        return facts.step // self._agree_every > before // self._agree_every


def _stored(uri: StoreURI, best: BestSteps) -> list[float]:
    """Return the values of the metric at the run's undamaged steps.

    Raises:
        PolicyError: the name is a misspelt one, or steps record another direction.
    """

    def stored() -> list[float]:
        with suppress(RunNotFoundError):
            run = Run.open(uri)
            facts = step_facts(run)
            check_names(run, RetentionPolicy(keep_best=[best]), for_later=True, facts=facts)
            return [
                fact.metrics[best.metric]
                for fact in facts
                if best.metric in fact.metrics and not fact.damaged
            ]
        return []

    return agreement.agree(stored)


def votes(*values: int) -> np.ndarray[Any, Any]:
    """Return the numbers of all processes, one row per process. All processes must call this."""
    return np.asarray(agreement.collect([int(value) for value in values]), np.int32)
