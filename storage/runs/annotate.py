"""Annotation of saved steps and runs: labels, metrics, their directions, and verifications."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType
from typing import Any, SupportsIndex

from cairn.storage.errors import PreconditionFailedError, StepChangedError
from cairn.storage.runs.history import StepKey
from cairn.storage.runs.records.annotations import Annotation, Better, Damage
from cairn.storage.runs.records.layout import RUN_FILE, annotation_file, manifest_file, trash_file
from cairn.storage.runs.records.placed import read_record, write_record
from cairn.storage.runs.records.run_info import RunInfo
from cairn.storage.runs.resolution import resolve_checkpoint
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.runs.trash import held
from cairn.storage.store.clock import rfc3339
from cairn.storage.store.uri import StoreURI

__all__ = [
    "annotate",
    "annotate_run",
    "annotate_step",
    "annotation_of",
    "note_shared_damage",
    "note_verified",
]


def annotate(
    reference: StoreURI | str | os.PathLike[str],
    *,
    labels: Mapping[str, str | None] | None = None,
    metrics: Mapping[str, Any] | None = None,
    better: Mapping[str, Better | None] | None = None,
    by: str = "",
) -> Annotation:
    """Set labels and metrics of a saved step, such as the results of an evaluation.

    Entries that are not named stay, including those that somebody else sets at the same time.

    Args:
        reference: "run" (its latest step), "run@alias", "run@best:METRIC" or "run/steps/N".
        labels: texts by name; None removes one.
        metrics: numbers by name, NaN and infinities too; None removes one.
        better: direction of metrics: "min" if lower is better, "max" if higher is. "best:METRIC"
            and retention use it.
        by: the caller's name; a deletion at the same moment is refused with it.

    Returns:
        All labels and metrics of the step now.

    Raises:
        InvalidURIError: the reference is malformed.
        RunNotFoundError, AliasNotFoundError, StepNotFoundError: there is no such run, alias or
            step.
        StepInFlightError: the step is being written.
        StepChangedError: the step is deleted, or about to be.
        UnsupportedFormatError: some entries can't be stored; all of these are listed.
        CorruptionError: the step's annotation can't be read.
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
    """Set entries of a step's annotation; other entries stay as they are.

    Concurrent changes are not lost: entries are merged into what the store has when they are
    written. The step is marked as in use meanwhile, so that no deleted step is annotated.

    Args:
        run: the run.
        step: number of a listed step; or a step of any attempt, such as one that an alias names and
            that was superseded.
        labels: texts by name; None removes one.
        metrics: numbers by name; None removes one, and its direction.
        better: direction of metrics: "min" if lower is better, "max" if higher is.
        by: the caller's name.
        check: called with the present annotation right before it is replaced; its errors are
            raised.

    Returns:
        The step's annotation now.

    Raises:
        StepNotFoundError: the step is not listed.
        StepInFlightError: the step is being written.
        StepChangedError: the step is deleted, or about to be.
        UnsupportedFormatError: some entries can't be stored (all of these are listed), or the
            annotation can't be read.
        CorruptionError: the annotation can't be read.
    """
    info = step if isinstance(step, StepInfo) else run.step(step)
    # Refuse what can't be kept before anything is written.
    annotation_of(run, info).changed(labels, metrics, better)

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
    """Note the result of a verification: the step is sound now, or damaged until found sound.

    Args:
        run: the run.
        info: the step.
        damage: the damage that was found; None: the step is sound.
        by: the caller's name.
        lifts: the damage noted when the verification began, which a sound result removes. If other
            damage is noted by now, nothing changes. By default any damage is removed.

    Returns:
        The step's annotation now.

    Raises:
        StepChangedError: the step is deleted.
        UnsupportedFormatError, CorruptionError: the annotation can't be read.
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
    """Note that a step is damaged because it shares bytes with a damaged one.

    Does nothing if damage of the step is noted already, or if it is deleted.

    Args:
        run: the run.
        key: (step, attempt).
        damage: the damage.
        by: the caller's name.

    Raises:
        UnsupportedFormatError, CorruptionError: the annotation can't be read.
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
    """Mark a step as in use within the context.

    A step whose deletion is announced is not marked, but may still be annotated, as it may stay.

    Raises:
        StepChangedError: the step is deleted.
    """
    with contextlib.ExitStack() as hold:
        try:
            hold.enter_context(held(run, key, by=by, reason=reason))
        except StepChangedError:
            if run.objects.existing([trash_file(*key), manifest_file(*key)]) != {
                manifest_file(*key)
            }:
                raise
        yield


def _replaced(run: Run, info: StepInfo, change: Callable[[Annotation], Annotation]) -> Annotation:
    """Change the annotation of a step in use by compare-and-swap, and return it."""
    name = annotation_file(info.step, info.attempt)
    while True:
        stored = read_record(run.objects, name, Annotation)
        before = Annotation() if stored is None else stored[0]
        after = change(before)
        if after == before:
            # The caller is told that this is durable, and its writer may have died before the
            # fsync.
            run.objects.sync(name)
            return before
        generation = None if stored is None else stored[1]
        try:
            return write_record(run.objects, name, after, generation=generation)[0]
        except PreconditionFailedError:
            continue  # another process was faster: merge into its version


def annotation_of(run: Run, info: StepInfo) -> Annotation:
    """Return the annotation of a step as it is now.

    Raises:
        UnsupportedFormatError, CorruptionError: the annotation can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    stored = read_record(run.objects, annotation_file(info.step, info.attempt), Annotation)
    return Annotation() if stored is None else stored[0]


def annotate_run(
    run: Run,
    labels: Mapping[str, str | None],
    *,
    check: Callable[[RunInfo], None] | None = None,
) -> RunInfo:
    """Set labels of a run; other labels stay as they are.

    Args:
        run: the run.
        labels: texts by name; None removes one.
        check: called with the present record right before it is replaced; its errors are raised.

    Returns:
        The run's record now.

    Raises:
        RunNotFoundError: there is no such run.
        UnsupportedFormatError: some labels can't be stored (all of these are listed), or the record
            can't be read.
        CorruptionError: the run's record can't be read.
    """
    Annotation().changed(labels)  # refuse what can't be kept before any request
    while True:
        stored = read_record(run.objects, RUN_FILE, RunInfo)
        if stored is None:
            run.info()  # raises an error that says what exists instead
            continue
        before, generation = stored
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
            continue  # another process was faster: merge into its version
