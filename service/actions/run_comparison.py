"""Runs beside each other: what differs between them, and curves of a metric."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.runs import run_row
from cairn.service.catalog import queries
from cairn.service.schemas import Run
from cairn.storage.runs.records.annotations import Better

MAX_POINTS: Final = 200_000
"""Largest number of steps of a run that are read for a curve: the first."""

MAX_METRICS: Final = 10_000
"""Largest number of metrics, counted for each run, that are compared: the first by name."""

RunName = tuple[str, str]
"""Names of a root and a run."""


@dataclass(frozen=True)
class ComparedRun:
    """Run that is compared with others, and its entries by kind."""

    run: Run
    config: Mapping[str, float | str]
    last: Mapping[str, float]
    best: Mapping[str, float]


@dataclass(frozen=True)
class ComparedRuns:
    """Runs that are compared.

    Attributes:
        runs: The runs, in the order of their names.
        missing: Names of runs that do not exist.
        better: Directions of metrics, by name.
        is_cut: There are more metrics than are compared.
    """

    runs: list[ComparedRun]
    missing: list[RunName]
    better: dict[str, Better]
    is_cut: bool

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics: those that most runs have first, then by name."""
        counts: dict[str, int] = {}
        for run in self.runs:
            for name in run.last:
                counts[name] = counts.get(name, 0) + 1
        return sorted(counts, key=lambda name: (-counts[name], name not in self.better, name))


def compare_runs(plane: ControlPlane, names: Sequence[RunName]) -> ComparedRuns:
    """Return the entries of some runs, as the catalog has them.

    Args:
        plane: The control plane.
        names: Names of runs that the caller may read.
    """
    with plane.catalog.query() as connection:
        rows = queries.run_rows(connection, names)
        metrics = queries.run_metrics(connection, list(rows.values()), MAX_METRICS + 1)
        configs = queries.run_configs(connection, list(rows.values()))
    last: dict[int, dict[str, float]] = {row.id: {} for row in rows.values()}
    best: dict[int, dict[str, float]] = {row.id: {} for row in rows.values()}
    better: dict[str, Better] = {}
    for metric in metrics[:MAX_METRICS]:
        last[metric.run_id][metric.name] = math.nan if metric.last is None else metric.last
        if metric.best is not None:
            best[metric.run_id][metric.name] = metric.best
        if metric.better is not None:
            better[metric.name] = metric.better
    present = [rows[name] for name in names if name in rows]
    return ComparedRuns(
        runs=[
            ComparedRun(queries.run(row), configs.get(row.id, {}), last[row.id], best[row.id])
            for row in present
        ],
        missing=[name for name in names if name not in rows],
        better=better,
        is_cut=len(metrics) > MAX_METRICS,
    )


def runs_named(plane: ControlPlane, names: Sequence[RunName]) -> list[Run]:
    """Return the runs of these names that the catalog has, in the order of the names."""
    with plane.catalog.query() as connection:
        rows = queries.run_rows(connection, names)
    return [queries.run(rows[name]) for name in names if name in rows]


@dataclass(frozen=True)
class Curve:
    """Values of a metric over a run's listed steps.

    Attributes:
        points: Steps, seconds since the first of them was saved, and finite values.
        not_finite: Number of values that are left out, since they are NaN or infinite.
        is_cut: The run has more steps than are read.
    """

    points: list[tuple[int, float, float]]
    not_finite: int
    is_cut: bool


def run_curve(plane: ControlPlane, root: str, run: str, metric: str) -> Curve:
    """Return the curve of a metric.

    Raises:
        UnknownRootError, RunNotFoundError: There is no such run.
        StoreUnavailableError: The store is needed, and does not answer.
    """
    with run_row(plane, root, run, refresh=False) as (connection, row):
        read = queries.metric_points(connection, row, metric, MAX_POINTS + 1)
    points: list[tuple[int, float, float]] = []
    times = [0.0 if point.created is None else point.created.timestamp() for point in read]
    begin = min(filter(None, times), default=0.0)
    for point, time in zip(read[:MAX_POINTS], times, strict=False):
        if point.value is not None and math.isfinite(point.value):
            points.append((point.step, max(0.0, time - begin), point.value))
    return Curve(points, len(read[:MAX_POINTS]) - len(points), len(read) > MAX_POINTS)
