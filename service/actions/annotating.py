"""Labels and metrics of saved steps, and labels of runs."""

from collections.abc import Mapping
from typing import Any

from cairn.service.access.callers import Caller
from cairn.service.actions.auditing import audited
from cairn.service.actions.listing import get_checkpoint, get_run, refuse_other
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.notes import verification_of
from cairn.service.errors import ResourceChangedError
from cairn.service.http.preconditions import Seen
from cairn.service.schemas import Checkpoint, Response, Run
from cairn.storage.runs.annotating import annotate_run, annotate_step
from cairn.storage.runs.records.annotations import Annotation, Better
from cairn.storage.runs.records.run_info import RunInfo


def annotate_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    *,
    labels: Mapping[str, str | None],
    metrics: Mapping[str, float | None],
    better: Mapping[str, Better | None],
    seen: Seen,
    attempt: int | None = None,
) -> Checkpoint:
    """Set labels and metrics of a listed step; others stay as they are.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        step: A listed step.
        labels: Texts by name; None removes a label.
        metrics: Numbers by name; None removes a metric.
        better: Direction of metrics: lower or higher is better.
        seen: Version of the step that the change is based on.
        attempt: Attempt that must have saved the step; None: any.

    Raises:
        RunNotFoundError, StepNotFoundError: There is no such run or step.
        StepInFlightError: The step is being written.
        StepChangedError: The step is deleted, or about to be; or another attempt than `attempt`
            saved it, or it was saved anew just now.
        ResourceChangedError: The step has changed since `seen`.
        UnsupportedFormatError: Invalid labels or metrics; all are listed.
    """
    found = plane.run(root, run)
    known = get_checkpoint(plane, root, run, step, refresh=True)

    def check(noted: Annotation) -> None:
        require_unchanged(known.model_copy(update=_noted(noted, known)), seen)

    detail = {"step": step, "labels": dict(labels), "metrics": _texts(metrics)}
    detail["better"] = dict(better)
    with audited(plane, caller, "checkpoint.annotate", root=root, run=run, **detail) as entry:
        listed = found.step(step)
        refuse_other(found, listed, known.attempt if attempt is None else attempt)
        noted = annotate_step(
            found,
            listed,
            labels=labels,
            metrics=metrics,
            better=better,
            by=caller.name,
            check=check,
        )
        entry.complete(attempt=listed.attempt, after=noted.model_dump(mode="json"))
    return get_checkpoint(plane, root, run, step, refresh=True)


def annotate_run_labels(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    labels: Mapping[str, str | None],
    *,
    seen: Seen,
) -> Run:
    """Set labels of a run; others stay as they are.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        labels: Texts by name; None removes a label.
        seen: Version of the run that the change is based on.

    Raises:
        RunNotFoundError: There is no such run.
        ResourceChangedError: The run has changed since `seen`.
        UnsupportedFormatError: Invalid labels; all are listed.
    """
    found = plane.run(root, run)
    known = get_run(plane, root, run, refresh=True)

    def check(info: RunInfo) -> None:
        require_unchanged(known.model_copy(update={"labels": info.labels}), seen)

    with audited(plane, caller, "run.annotate", root=root, run=run, labels=dict(labels)) as entry:
        info = annotate_run(found, labels, check=check)
        entry.complete(after=info.labels)
    return get_run(plane, root, run, refresh=True)


def _noted(one: Annotation, of: Checkpoint) -> dict[str, Any]:
    kept = {"labels": one.labels, "metrics": one.metrics, "better": one.better}
    return {**kept, **verification_of(one, of.state)}


def _texts(metrics: Mapping[str, float | None]) -> dict[str, Any]:
    """Return metrics in their stored form, with text for NaN, which JSON lacks."""
    kept = {name: value for name, value in metrics.items() if value is not None}
    numbers: dict[str, Any] = Annotation(metrics=kept).model_dump(mode="json")["metrics"]
    return dict.fromkeys(metrics) | numbers


def require_unchanged(now: Response, seen: Seen) -> None:
    """Raise unless the resource is as the client saw it.

    Raises:
        ResourceChangedError: It has changed.
    """
    if not seen.fits(now):
        raise ResourceChangedError(
            "expected it as it was last seen (If-Match), found it changed. `current` is how it is "
            "now: decide anew, or send `If-Match: *` for whatever it is.",
            extra={"current": now.model_dump(mode="json")},
        )
