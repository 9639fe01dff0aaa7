"""Which runs are failing: what was done to them last came to a bad end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import outlooks
from cairn.service.schemas import OperationKind, OperationState, Run

_WHOLE: Final = None
"""In place of a step: all of the run."""


@dataclass(frozen=True)
class Failure:
    """A job that failed, and that no later one of its kind has made good.

    Attributes:
        kind: Of the job, as `OperationKind` has it.
        operation: Its id.
        step: Of a verification, whose bytes it read; None: those of the run.
    """

    kind: str
    operation: str
    step: int | None


def run_failures(plane: ControlPlane, runs: Sequence[Run]) -> list[tuple[Failure, ...]]:
    """What is failing in each of some runs, from the catalog alone; newest first.

    It knows of the ends of jobs as long as events are kept.
    """
    with plane.catalog.query() as connection:
        ends = [outlooks.job_ends(connection, run.root, run.name) for run in runs]
    return [failures_of(found) for found in ends]


def failures_of(ends: Iterable[Mapping[str, Any]]) -> tuple[Failure, ...]:
    """The failures among ends of jobs of one run, newest first, as events tell them; pure.

    Of each kind of job the last end counts, of verifications that of each step: one that found a
    step damaged is made good by a later one of that step, or of the run. A cancel is no end of
    either kind.
    """
    found: list[Failure] = []
    settled: set[tuple[str, object]] = set()
    for end in ends:
        kind, state = str(end["kind"]), end["state"]
        if state not in (OperationState.SUCCEEDED, OperationState.FAILED):
            continue
        of_step = kind == OperationKind.VERIFY
        step = end.get("step") if of_step else _WHOLE
        if (kind, step) in settled or (kind, _WHOLE) in settled:
            continue
        settled.add((kind, step))
        if state == OperationState.FAILED:
            found.append(Failure(kind, str(end["operation"]), step))
    return tuple(found)
