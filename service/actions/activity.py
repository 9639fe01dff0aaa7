"""Activity of runs, from their last steps in the catalog."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import queries, run_health
from cairn.service.catalog.queries import RecentStep
from cairn.service.schemas import CheckpointState, Run

RECENT: Final = 24
"""Number of a run's last steps that its pace is computed from."""

_DAY: Final = 86_400.0
_STALLED: Final = frozenset({CheckpointState.ABANDONED, CheckpointState.UNJUDGED})


@dataclass(frozen=True)
class Activity:
    """Activity of a run.

    Attributes:
        saved: Its last listed steps, oldest first.
        writing: Number of the step that is being written; None: none is.
        stalled: Number of a step whose writer is gone, if nothing was saved after it.
        damaged: Number of the highest listed step, if it is damaged.
        seconds_apart: Median interval between two steps, in seconds; None: there are too few.
        bytes_per_day: Growth of the run at that pace, in bytes per day.
        aliases: Names of its aliases, and the steps that they name.
    """

    saved: tuple[RecentStep, ...] = ()
    writing: int | None = None
    stalled: int | None = None
    damaged: int | None = None
    seconds_apart: float | None = None
    bytes_per_day: float | None = None
    aliases: tuple[tuple[str, int], ...] = ()

    @property
    def last_saved(self) -> datetime | None:
        """Time at which its highest listed step was saved."""
        return self.saved[-1].created if self.saved else None


def run_activity(plane: ControlPlane, runs: Sequence[Run]) -> list[Activity]:
    """Return the activity of each of some runs, in their order, from the catalog alone."""
    with plane.catalog.query() as connection:
        recent = [queries.recent_steps(connection, run.root, run.name, RECENT) for run in runs]
        named = run_health.aliases(connection, {(run.root, run.name) for run in runs})
    return [
        activity_of(steps, named[run.root, run.name])
        for run, steps in zip(runs, recent, strict=True)
    ]


def activity_of(steps: Sequence[RecentStep], aliases: Sequence[tuple[str, int]] = ()) -> Activity:
    """Compute the activity of a run from its last steps, highest first; pure."""
    saved = [step for step in reversed(steps) if step.state == CheckpointState.LISTED]
    highest = saved[-1].step if saved else -1
    later = [step for step in steps if step.step > highest]
    writing = [step.step for step in later if step.state == CheckpointState.IN_FLIGHT]
    stalled = [step.step for step in later if step.state in _STALLED]
    moments = [step.created for step in saved if step.created is not None]
    apart = [(after - before).total_seconds() for before, after in pairwise(moments)]
    pace = median(apart) if len(apart) > 1 else None
    sizes = [step.nbytes for step in saved if step.nbytes is not None]
    return Activity(
        saved=tuple(saved),
        writing=writing[0] if writing else None,
        stalled=stalled[0] if stalled and not writing else None,
        damaged=saved[-1].step if saved and saved[-1].is_damaged else None,
        seconds_apart=pace,
        bytes_per_day=_DAY / pace * median(sizes) if pace and sizes else None,
        aliases=tuple(aliases),
    )
