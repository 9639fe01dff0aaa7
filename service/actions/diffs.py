"""Differences between two steps, of one run or of two."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from cairn.service.actions.caches import LeafChange, OpenStep, StepCache, StepChanges
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.tensors import tensor_of
from cairn.service.schemas import (
    EntryDifference,
    LeafCounts,
    LeafDifference,
    StepDiff,
    StepName,
    ValueDifference,
)
from cairn.storage.reading import step_diff
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.reading.tensor_parts import TensorPart, json_number
from cairn.storage.runs.annotate import annotation_of
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo

MAX_COMPARED_MEMORY_BYTES: Final = 512 << 20
"""Memory that a comparison of values may use."""

MAX_COMPARED_BYTES: Final = 4 << 30
"""Largest size of the chunks that are read from both steps for one answer."""


@dataclass(frozen=True)
class DiffSide:
    """One side of a comparison of two steps.

    Attributes:
        name: Name of the step.
        manifest: Manifest of the step.
        annotation: Labels and metrics of the step.
        steps: Cache that opens the step.
    """

    name: StepName
    run: Run
    info: StepInfo
    manifest: Manifest
    annotation: Annotation
    steps: StepCache

    @classmethod
    def of(cls, name: StepName, run: Run, info: StepInfo, steps: StepCache) -> "DiffSide":
        """Return the side of a listed step.

        Args:
            name: Name of the step, without its manifest's digest.
            run: Run of the step.
            info: Info of the step from the run's list.
            steps: Cache that opens the step, if its leaves are needed.

        Raises:
            CorruptionError, UnsupportedFormatError: A record of the step is unreadable.
            StoreUnavailableError: The store does not answer.
        """
        name = name.model_copy(update={"manifest_digest": info.manifest_digest})
        return cls(name, run, info, run.manifest(info), annotation_of(run, info), steps)

    @classmethod
    def open(cls, plane: ControlPlane, root: str, run: str, step: int) -> "DiffSide":
        """Find a listed step, and return its side.

        Raises:
            UnknownRootError, RunNotFoundError, StepNotFoundError, StepInFlightError: There is no
                such step.
            CorruptionError, UnsupportedFormatError: A record of the step is unreadable.
            StoreUnavailableError: The store does not answer.
        """
        stored_run = plane.run(root, run)
        name = StepName(root=root, run=run, step=step)
        return cls.of(name, stored_run, stored_run.step(step), plane.steps)

    @cached_property
    def step(self) -> OpenStep:
        """Opened step, read at first use."""
        return self.steps.open(self.run, self.info)

    @cached_property
    def reader(self) -> CheckpointReader:
        """Reader of the step's values."""
        return self.step.reader()


@dataclass(frozen=True)
class DiffSelection:
    """Selection of the leaf differences in an answer.

    Attributes:
        item: Only leaves of this item; None: of all.
        prefix: Only leaves whose path begins with this text.
        values: Compare values too.
        after: Number of selected differences to skip, since the client has them already.
        limit: Largest number of differences; None: all.
        most_bytes: Largest number of bytes of chunks to read; None: no limit.
    """

    item: str | None
    prefix: str
    values: bool
    after: int = 0
    limit: int | None = None
    most_bytes: int | None = None


def diff_steps(this: DiffSide, other: DiffSide, selection: DiffSelection) -> tuple[StepDiff, bool]:
    """Compare two steps; return the differences, and whether there are more.

    Equal leaves are never read. If both steps have equal leaves, or were compared recently, only
    their manifests are read. An answer ends early once it has read many bytes.

    Raises:
        CorruptionError: An index, or stored values, are damaged.
        StoreUnavailableError: The store does not answer.
    """
    changes = _changes(this, other)
    counts = Counter[str](leaf.change for leaf in changes.leaves)
    named = [leaf for leaf in changes.leaves if selection.item in {None, leaf.item}]
    named = [leaf for leaf in named if leaf.path.startswith(selection.prefix)]
    page = _compared(this, other, named[selection.after :][: selection.limit], selection)
    notes, other_notes = this.annotation.entries(), other.annotation.entries()
    answer = StepDiff(
        this=this.name,
        other=other.name,
        equal=not changes.leaves,
        leaves=LeafCounts(equal=changes.equal, **{name: counts[name] for name in _CHANGES}),
        config=_entries(_config(this), _config(other)),
        metrics=_entries(notes["metrics"], other_notes["metrics"]),
        labels=_entries(notes["labels"], other_notes["labels"]),
        differences=page,
    )
    return answer, len(named) > selection.after + len(page)


_CHANGES: Final = tuple(name for name in LeafCounts.model_fields if name != "equal")


def _changes(this: DiffSide, other: DiffSide) -> StepChanges:
    """Return the differing leaves.

    Neither step is read if both have the same leaves digest, or if their difference is cached.
    """
    indexes = this.manifest.index, other.manifest.index
    digests = {index and index.leaves_digest for index in indexes}
    if len(digests) == 1 and indexes[0] is not None and None not in digests:
        return StepChanges((), indexes[0].leaves)
    names = [
        (str(side.run.step_uri(side.info)), side.info.manifest_digest) for side in (this, other)
    ]
    if any(digest is None for _, digest in names):
        return StepChanges.between(this.step, other.step)
    return this.steps.changes.get(tuple(names), lambda: StepChanges.between(this.step, other.step))


def _compared(
    this: DiffSide, other: DiffSide, differences: Iterable[LeafChange], selection: DiffSelection
) -> list[LeafDifference]:
    """Return the differences in the form of the API, up to the limit of bytes to read."""
    page: list[LeafDifference] = []
    most = math.inf if selection.most_bytes is None else selection.most_bytes
    read = 0
    for leaf in differences:
        difference = LeafDifference(
            item=leaf.item,
            path=leaf.path,
            change=leaf.change,
            this=None if leaf.this is None else tensor_of(leaf.item, leaf.path, leaf.this),
            other=None if leaf.other is None else tensor_of(leaf.item, leaf.path, leaf.other),
        )
        if selection.values and step_diff.has_counterparts(leaf.change):
            parts = [TensorPart.of(side.reader, leaf.item, leaf.path) for side in (this, other)]
            needed = sum(part.stored_bytes for part in parts)
            if read and read + needed > most:
                break
            more = _values(parts[0], parts[1], needed, most)
            difference = difference.model_copy(update=more)
            read += 0 if "not_compared" in more else needed
        page.append(difference)
    return page


def _values(this: TensorPart, other: TensorPart, needed: int, most: float) -> dict[str, Any]:
    """Compare the values of a leaf; return the differences, or why they were not compared."""
    if needed > most:
        why = f"{needed} bytes: an answer reads {most} at most"
        return {"not_compared": f"{why}; use `cairn diff` where the store is"}
    if math.isfinite(most) and this.held_bytes + other.held_bytes > MAX_COMPARED_MEMORY_BYTES:
        largest = max(this.chunk_bytes, other.chunk_bytes)
        why = f"chunks of {largest} bytes are too large for an answer"
        return {"not_compared": f"{why}; use `cairn diff` where the store is"}
    differences = step_diff.diff_values(this, other)
    if differences is None:
        return {"not_compared": f"no numbers hold both {this.dtype.name} and {other.dtype.name}"}
    change = differences.change
    return {
        "values": ValueDifference(
            elements=change.count,
            differing=differences.differing,
            not_finite=change.nan + change.positive_infinity + change.negative_infinity,
            max_absolute=differences.max_absolute,
            mean=change.mean,
            norm=None if change.norm is None else json_number(change.norm),
            relative=differences.relative,
        )
    }


def _config(side: DiffSide) -> dict[str, Any]:
    return {} if side.manifest.model is None else side.manifest.model.config


def _entries(this: dict[str, Any], other: dict[str, Any]) -> list[EntryDifference]:
    return [EntryDifference(**asdict(entry)) for entry in step_diff.diff_entries(this, other)]
