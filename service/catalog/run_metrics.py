"""Metrics of runs: for each run and metric, the last and the best value among its listed steps.

A run's list is sorted by them, so they are columns with an index. They follow the steps' rows: a
new step is added to them, and a metric is computed again from all steps only if a step that it
refers to was changed or is gone.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from cairn.service.catalog.models import LONGEST_METRIC, CheckpointRow, RunMetricRow, plain_text
from cairn.service.schemas import CheckpointState

MAX_RUN_METRICS: Final = 1000
"""Largest number of metrics of a run that lists are sorted by: the first that it has saved."""

_READ_AT_ONCE: Final = 1000  # rows


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a listed step.

    Attributes:
        step: Number of the step.
        metrics: Values by name; values that are not finite may be text.
        better: Directions by name.
    """

    step: int
    metrics: Mapping[str, float | str]
    better: Mapping[str, str]


@dataclass
class _Metric:
    """Metric of a run while steps are added to it, in the columns of its row."""

    last: float | None = None
    last_step: int = -1
    better: str | None = None
    better_step: int | None = None
    best: float | None = None
    best_step: int | None = None

    def add(self, step: int, value: float, better: str | None) -> bool:
        """Add a step; return False if the direction changed, so that `best` may be wrong."""
        number = None if math.isnan(value) else value
        turned = False
        if better is not None and (self.better_step is None or step >= self.better_step):
            turned = better != self.better and self.last_step >= 0
            self.better, self.better_step = better, step
        if step >= self.last_step:
            self.last, self.last_step = number, step
        self._improve(step, number)
        return not turned

    def _improve(self, step: int, number: float | None) -> None:
        if number is None or self.better is None:
            return
        if self.best is not None and self.best_step is not None:
            ahead = number < self.best if self.better == "min" else number > self.best
            if not ahead and (number != self.best or step >= self.best_step):
                return
        self.best, self.best_step = number, step

    @classmethod
    def of(cls, steps: list[tuple[int, float, str | None]]) -> "_Metric":
        """Compute it from all steps that have it."""
        metric = cls()
        for step, value, better in steps:
            metric.add(step, value, better)
        metric.best = metric.best_step = None
        for step, value, _ in steps:
            metric._improve(step, None if math.isnan(value) else value)
        return metric


@dataclass
class _Changes:
    """Metrics of a run in the catalog, and what is to be written."""

    metrics: dict[str, _Metric]
    written: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    is_cut: bool = False

    def forget(self, step: StepMetrics) -> None:
        """Mark the metrics that refer to a step which was changed or is gone."""
        for name in map(_name, step.metrics):
            metric = self.metrics.get(name)
            if metric is not None and step.step in (
                metric.last_step,
                metric.best_step,
                metric.better_step,
            ):
                self.stale.add(name)

    def add(self, step: StepMetrics) -> None:
        """Add a step's metrics to those of the run."""
        better = {_name(name): way for name, way in step.better.items()}
        entries = sorted(step.metrics.items(), key=itemgetter(0))
        for name, value in ((_name(raw), value) for raw, value in entries):
            if name in self.stale:
                continue
            if name not in self.metrics:
                if len(self.metrics) >= MAX_RUN_METRICS:
                    self.is_cut = True
                    continue
                self.metrics[name] = _Metric()
            if not self.metrics[name].add(step.step, float(value), better.get(name)):
                self.stale.add(name)
            self.written.add(name)


def write_run_metrics(
    session: Session, run_id: int, before: Iterable[StepMetrics], after: Iterable[StepMetrics]
) -> bool:
    """Update the metrics of a run after its steps were written.

    Args:
        session: Session of the catalog, for writing.
        run_id: Id of the run's row.
        before: Steps that were listed before and have changed or are gone, as they were.
        after: Steps that are listed and new or changed, as they are.

    Returns:
        True if metrics were left out, since the run has too many.
    """
    old = {step.step: step for step in before}
    new = {step.step: step for step in after}
    same = {number for number, step in old.items() if new.get(number) == step}
    if len(same) == len(old) == len(new):
        return False
    columns = tuple(_Metric.__dataclass_fields__)
    query = select(RunMetricRow.name, *(getattr(RunMetricRow, name) for name in columns))
    rows = session.execute(query.where(RunMetricRow.run_id == run_id)).all()
    stored = {name: _Metric(*values) for name, *values in rows}
    names = set(stored)
    changes = _Changes(stored)
    for number in sorted(old.keys() - same):
        changes.forget(old[number])
    for number in sorted(new.keys() - same):
        changes.add(new[number])
    if changes.stale:
        computed = _computed(session, run_id, changes.stale)
        stored.update(computed)
        for name in changes.stale - computed.keys():
            del stored[name]
    gone = names - stored.keys()
    written = (changes.written | changes.stale) & stored.keys()
    if gone:
        session.execute(
            delete(RunMetricRow).where(RunMetricRow.run_id == run_id, RunMetricRow.name.in_(gone))
        )
    if added := sorted(written - names):
        session.execute(insert(RunMetricRow), [_row(run_id, name, stored) for name in added])
    if changed := sorted(written & names):
        session.execute(update(RunMetricRow), [_row(run_id, name, stored) for name in changed])
    return changes.is_cut


def _name(name: str) -> str:
    return plain_text(name, LONGEST_METRIC)


def _row(run_id: int, name: str, metrics: Mapping[str, _Metric]) -> dict[str, Any]:
    return {"run_id": run_id, "name": name, **vars(metrics[name])}


def _computed(session: Session, run_id: int, names: set[str]) -> dict[str, _Metric]:
    """Compute some metrics from all listed steps."""
    session.flush()
    query = select(CheckpointRow.step, CheckpointRow.metrics, CheckpointRow.better).where(
        CheckpointRow.run_id == run_id, CheckpointRow.state == CheckpointState.LISTED
    )
    steps: dict[str, list[tuple[int, float, str | None]]] = {}
    for step, metrics, better in session.execute(query).yield_per(_READ_AT_ONCE):
        for name, value in metrics.items():
            plain = _name(name)
            if plain in names:
                steps.setdefault(plain, []).append((step, float(value), better.get(name)))
    return {name: _Metric.of(entries) for name, entries in steps.items()}
