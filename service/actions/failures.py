"""Failures of runs: the last job of some kind has failed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import run_health
from cairn.service.schemas import OperationKind, OperationState, Run

_WHOLE: Final = None
"""Used in place of a step number for failures that concern the whole run."""


@dataclass(frozen=True)
class Failure:
    """Failed job that no later job of its kind has corrected.

    Attributes:
        kind: Kind of the job, see `OperationKind`.
        operation: Id of the job.
        step: Step that a verification read; None: the whole run.
    """

    kind: str
    operation: str
    step: int | None


def run_failures(plane: ControlPlane, runs: Sequence[Run]) -> list[tuple[Failure, ...]]:
    """Return the failures of each of some runs, newest first, from the catalog alone.

    Failures are read from events, so those older than the kept events are missing.
    """
    with plane.catalog.query() as connection:
        ends = [run_health.job_ends(connection, run.root, run.name) for run in runs]
    return [failures_of(run_ends) for run_ends in ends]


def failures_of(ends: Iterable[Mapping[str, Any]]) -> tuple[Failure, ...]:
    """Return the failures among a run's ended jobs, newest first; pure.

    Only the last end of each kind of job counts; for verifications, the last end for each step. A
    verification of the whole run replaces the earlier ones of its steps. Cancelled jobs are
    ignored.

    Args:
        ends: Details of the events of ended jobs, newest first.
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
