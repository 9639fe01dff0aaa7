"""Failures of runs: the last job of some kind has failed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import run_health
from cairn.service.schemas import OperationKind, OperationState, Run

_WHOLE: Final = None
"""Stands in place of a step for the whole run."""


@dataclass(frozen=True)
class Failure:
    """Failed job that no later job of its kind has made good.

    Attributes:
        kind: Kind of the job, see `OperationKind`.
        operation: Id of the job.
        step: Step that a verification read; None: the whole run.
    """

    kind: str
    operation: str
    step: int | None


def run_failures(plane: ControlPlane, runs: Sequence[Run]) -> list[tuple[Failure, ...]]:
    """Return the failures of some runs, newest first, from the catalog alone.

    Ends of jobs are known only as long as events are kept.
    """
    with plane.catalog.query() as connection:
        ends = [run_health.job_ends(connection, run.root, run.name) for run in runs]
    return [failures_of(run_ends) for run_ends in ends]


def failures_of(ends: Iterable[Mapping[str, Any]]) -> tuple[Failure, ...]:
    """Return the failures among a run's ended jobs, newest first as in the events; pure.

    For each kind only the last end counts; for verifications the last one of each step. A later
    verification of the step, or of the run, makes a failed one good. Cancelled jobs are ignored.
    """
    failures: list[Failure] = []
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
            failures.append(Failure(kind, str(end["operation"]), step))
    return tuple(failures)
