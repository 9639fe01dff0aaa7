"""What people say of steps and runs that are there already: labels, metrics, what is better."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType
from typing import Any, SupportsIndex

from cairn.storage.errors import PreconditionFailedError, StepChangedError
from cairn.storage.runs.history import StepKey
from cairn.storage.runs.records import (
    RUN_FILE,
    Annotation,
    Better,
    Damage,
    RunInfo,
    annotation_file,
    manifest_file,
    read_record,
    trash_file,
    write_record,
)
from cairn.storage.runs.resolving import resolve_checkpoint
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.runs.trash import held
from cairn.storage.store import StoreURI, rfc3339

__all__ = [
    "annotate",
    "annotate_run",
    "annotate_step",
    "note_shared_damage",
    "note_verified",
    "noted_of",
]


def annotate(
    reference: StoreURI | str | os.PathLike[str],
    *,
    labels: Mapping[str, str | None] | None = None,
    metrics: Mapping[str, Any] | None = None,
    better: Mapping[str, Better | None] | None = None,
    by: str = "",
) -> Annotation:
    """Note labels and metrics of a step that was saved, such as what an evaluation found.

    Entries that are not named stay, also those that somebody else notes at the same time.

    Args:
        reference: "run" (its latest step), "run@alias", "run@best:METRIC" or "run/steps/N".
        labels: texts by name; None removes one.
        metrics: numbers by name, NaN and infinities too; None removes one.
        better: of metrics, whether small ("min") or large values ("max") are good. "best:METRIC"
            and retention go by it.
        by: who notes it, told to whoever wants to delete the step at that moment.

    Returns:
        All that is noted of the step now.

    Raises:
        InvalidURIError: the reference is malformed.
        RunNotFoundError, AliasNotFoundError, StepNotFoundError: there is none.
        StepInFlightError: the step is being written.
        StepChangedError: it is deleted, or about to be.
        UnsupportedFormatError: entries that can't be kept; all are listed.
        CorruptionError: what is noted can't be read.
    """
    run, info = resolve_checkpoint(reference, damaged=None)
    return annotate_step(run, info, labels=labels, metrics=metrics, better=better, by=by)


def annotate_step(
    run: Run,
    step: StepInfo | SupportsIndex,
    *,
    labels: Mapping[str, str | None] | None = None,
    metrics: Mapping[str, Any] | None = None,
    better: Mapping[str, Better | None] | None = None,
    by: str = "",
    check: Callable[[Annotation], None] | None = None,
) -> Annotation:
    """Set entries of a step's annotation; others stay as they are.

    Whoever else does so at the same time is not overwritten: entries are merged with what is there
    when they are written. The step is held meanwhile, so that nobody notes what is deleted.

    Args:
        run: the run.
        step: number of one of its listed steps; or the one that is meant, of whichever attempt: an
            alias keeps what it names, also if that was set aside.
        labels: texts by name; None removes one.
        metrics: numbers by name; None removes one, and what is better of it.
        better: of metrics, whether small ("min") or large values ("max") are good.
        by: who asks.
        check: is told what is there, right before that is written over; what it raises is raised.

    Returns:
        All that is noted of the step now.

    Raises:
        StepNotFoundError: the step is not listed.
        StepInFlightError: it is being written.
        StepChangedError: it is deleted, or about to be.
        UnsupportedFormatError: entries that can't be kept; all are listed.
        UnsupportedFormatError, CorruptionError: what is noted can't be read.
    """
    info = step if isinstance(step, StepInfo) else run.step(step)
    # What can't be kept is refused before anything is done.
    noted_of(run, info).changed(labels, metrics, better)

    def change(before: Annotation) -> Annotation:
        if check is not None:
            check(before)
        return before.changed(labels, metrics, better)

    with held(run, (info.step, info.attempt), by=by, reason="annotate it"):
        return _replaced(run, info, change)


def note_verified(
    run: Run,
    info: StepInfo,
    *,
    damage: Damage | None = None,
    by: str = "",
    lifts: Damage | EllipsisType | None = ...,
) -> Annotation:
    """Note what verifying a step found: it is sound as of now, or damaged until it is found sound.

    Args:
        run: the run.
        info: the step.
        damage: what is wrong with it; None: nothing.
        by: who asks.
        lifts: the damage that a sound step is rid of, which is what was noted when its verification
            began: if another is noted by now, nothing changes. By default it is rid of any.

    Returns:
        All that is noted of the step now.

    Raises:
        StepChangedError: it is deleted.
        UnsupportedFormatError, CorruptionError: what is noted can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    update = {"verified": rfc3339(run.clock()) if damage is None else None, "damaged": damage}

    def change(before: Annotation) -> Annotation:
        if damage is None and lifts is not ... and before.damaged not in (None, lifts):
            return before
        return before.model_copy(update=update)

    with _kept(run, (info.step, info.attempt), by=by, reason="note that it was verified"):
        return _replaced(run, info, change)


def note_shared_damage(run: Run, key: StepKey, damage: Damage, *, by: str = "") -> None:
    """Note that a step is damaged because another one is; not if it is known to be, or deleted.

    Args:
        run: the run.
        key: (step, attempt).
        damage: what is wrong with it.
        by: who asks.

    Raises:
        UnsupportedFormatError, CorruptionError: what is noted can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    update = {"verified": None, "damaged": damage}

    def change(before: Annotation) -> Annotation:
        return before if before.damaged is not None else before.model_copy(update=update)

    with (
        contextlib.suppress(StepChangedError),
        _kept(run, key, by=by, reason="note that it is damaged"),
    ):
        _replaced(run, StepInfo(*key, StepState.LISTED), change)


@contextlib.contextmanager
def _kept(run: Run, key: StepKey, *, by: str, reason: str) -> Iterator[None]:
    """Hold a step. One whose deletion has only been declared goes on unheld, as it may stay.

    Raises:
        StepChangedError: it is deleted.
    """
    with contextlib.ExitStack() as hold:
        try:
            hold.enter_context(held(run, key, by=by, reason=reason))
        except StepChangedError:
            if run.objects.present([trash_file(*key), manifest_file(*key)]) != {
                manifest_file(*key)
            }:
                raise
        yield


def _replaced(run: Run, info: StepInfo, change: Callable[[Annotation], Annotation]) -> Annotation:
    """What is noted of a step that is held, changed: of what is there when it is written."""
    name = annotation_file(info.step, info.attempt)
    while True:
        found = read_record(run.objects, name, Annotation)
        before = Annotation() if found is None else found[0]
        after = change(before)
        if after == before:
            run.objects.sync(name)
            return before
        generation = None if found is None else found[1]
        try:
            return write_record(run.objects, name, after, generation=generation)[0]
        except PreconditionFailedError:
            continue  # somebody else was quicker


def noted_of(run: Run, info: StepInfo) -> Annotation:
    """The labels and metrics of a step, as they are now.

    Raises:
        UnsupportedFormatError, CorruptionError: what is noted can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    found = read_record(run.objects, annotation_file(info.step, info.attempt), Annotation)
    return Annotation() if found is None else found[0]


def annotate_run(
    run: Run,
    labels: Mapping[str, str | None],
    *,
    check: Callable[[RunInfo], None] | None = None,
) -> RunInfo:
    """Set labels of a run; others stay as they are.

    Args:
        run: the run.
        labels: texts by name; None removes one.
        check: is told what is there, right before that is written over; what it raises is raised.

    Returns:
        What the run says of itself now.

    Raises:
        RunNotFoundError: there is no such run.
        UnsupportedFormatError: labels that can't be kept; all are listed.
        UnsupportedFormatError, CorruptionError: what the run says of itself can't be read.
    """
    Annotation().changed(labels)  # nothing is asked of the store for what can't be kept
    while True:
        found = read_record(run.objects, RUN_FILE, RunInfo)
        if found is None:
            run.info()  # raises, and says what there is instead
            continue
        before, generation = found
        if check is not None:
            check(before)
        changed = Annotation(labels=before.labels).changed(labels)
        after = before.model_copy(update={"labels": changed.labels})
        if after == before:
            run.objects.sync(RUN_FILE)
            return before
        try:
            return write_record(run.objects, RUN_FILE, after, generation=generation)[0]
        except PreconditionFailedError:
            continue  # somebody else was quicker
