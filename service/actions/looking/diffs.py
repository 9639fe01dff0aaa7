"""What differs between two steps, of one run or of two."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from cairn.service.actions.looked_into import LeafChange, OpenStep, OpenSteps, StepChanges
from cairn.service.actions.looking.tensors import tensor_of
from cairn.service.actions.plane import ControlPlane
from cairn.service.schemas import (
    EntryDifference,
    LeafCounts,
    LeafDifference,
    StepDiff,
    StepName,
    ValueDifference,
)
from cairn.storage import reading
from cairn.storage.reading import CheckpointReader, TensorPart, json_number
from cairn.storage.runs import Annotation, Manifest, Run, StepInfo, noted_of

COMPARED_HELD_BYTES: Final = 512 << 20
"""Memory that a comparison of values takes."""

MOST_COMPARED_BYTES: Final = 4 << 30
"""Of the chunks of both steps whose values are compared for one answer."""


@dataclass(frozen=True)
class Side:
    """One of two steps that are compared.

    Attributes:
        name: Of it.
        manifest: Its manifest.
        noted: Its labels and metrics.
        steps: What opens it.
    """

    name: StepName
    run: Run
    info: StepInfo
    manifest: Manifest
    noted: Annotation
    steps: OpenSteps

    @classmethod
    def of(cls, name: StepName, run: Run, info: StepInfo, steps: OpenSteps) -> "Side":
        """A listed step.

        Args:
            name: Of it, without its manifest's digest.
            run: Its run.
            info: It, as that has listed it.
            steps: What opens it, if its leaves are asked for.

        Raises:
            CorruptionError, UnsupportedFormatError: A record of it can't be read.
            StoreUnavailableError: The store does not answer.
        """
        name = name.model_copy(update={"manifest_digest": info.manifest_digest})
        return cls(name, run, info, run.manifest(info), noted_of(run, info), steps)

    @classmethod
    def open(cls, plane: ControlPlane, root: str, run: str, step: int) -> "Side":
        """A listed step.

        Raises:
            UnknownRootError, RunNotFoundError, StepNotFoundError, StepInFlightError: There is no
                such one.
            CorruptionError, UnsupportedFormatError: A record of it can't be read.
            StoreUnavailableError: The store does not answer.
        """
        found = plane.run(root, run)
        name = StepName(root=root, run=run, step=step)
        return cls.of(name, found, found.step(step), plane.steps)

    @cached_property
    def step(self) -> OpenStep:
        """Its leaves, which are read if they are asked for."""
        return self.steps.open(self.run, self.info)

    @cached_property
    def reader(self) -> CheckpointReader:
        """What reads its values."""
        return self.step.reader()


@dataclass(frozen=True)
class Wanted:
    """Which differences of leaves an answer names.

    Attributes:
        item: Those of this item; None: of all.
        prefix: Those whose path begins so.
        values: Whether values are compared.
        after: How many of these are known already.
        limit: At most so many; None: all.
        most_bytes: Of chunks that are read for it; None: any number.
    """

    item: str | None
    prefix: str
    values: bool
    after: int = 0
    limit: int | None = None
    most_bytes: int | None = None


def diff_steps(this: Side, other: Side, wanted: Wanted) -> tuple[StepDiff, bool]:
    """What differs; whether there are more leaves of that kind.

    Equal leaves are never read, and nothing but the manifests of steps that were saved with equal
    leaves, or that were compared lately. An answer ends early once much was read for it.

    Raises:
        CorruptionError: An index, or stored values, are not what was saved.
        StoreUnavailableError: The store does not answer.
    """
    found = _changes(this, other)
    counts = Counter[str](one.change for one in found.leaves)
    named = [one for one in found.leaves if wanted.item in {None, one.item}]
    named = [one for one in named if one.path.startswith(wanted.prefix)]
    page = _compared(this, other, named[wanted.after :][: wanted.limit], wanted)
    ours, theirs = this.noted.entries(), other.noted.entries()
    answer = StepDiff(
        this=this.name,
        other=other.name,
        equal=not found.leaves,
        leaves=LeafCounts(equal=found.equal, **{name: counts[name] for name in _CHANGES}),
        config=_entries(_config(this), _config(other)),
        metrics=_entries(ours["metrics"], theirs["metrics"]),
        labels=_entries(ours["labels"], theirs["labels"]),
        differences=page,
    )
    return answer, len(named) > wanted.after + len(page)


_CHANGES: Final = tuple(name for name in LeafCounts.model_fields if name != "equal")


def _changes(this: Side, other: Side) -> StepChanges:
    """The leaves that differ; read from neither step if that is known."""
    indexes = this.manifest.index, other.manifest.index
    digests = {one and one.leaves_digest for one in indexes}
    if len(digests) == 1 and indexes[0] is not None and None not in digests:
        return StepChanges((), indexes[0].leaves)
    names = [
        (str(side.run.step_uri(side.info)), side.info.manifest_digest) for side in (this, other)
    ]
    if any(digest is None for _, digest in names):
        return StepChanges.between(this.step, other.step)
    return this.steps.changes.get(tuple(names), lambda: StepChanges.between(this.step, other.step))


def _compared(
    this: Side, other: Side, differences: Iterable[LeafChange], wanted: Wanted
) -> list[LeafDifference]:
    """Them for an answer, up to where too much would be read for it."""
    page: list[LeafDifference] = []
    most = math.inf if wanted.most_bytes is None else wanted.most_bytes
    read = 0
    for one in differences:
        told = LeafDifference(
            item=one.item,
            path=one.path,
            change=one.change,
            this=None if one.this is None else tensor_of(one.item, one.path, one.this),
            other=None if one.other is None else tensor_of(one.item, one.path, one.other),
        )
        if wanted.values and reading.has_counterparts(one.change):
            parts = [TensorPart.of(side.reader, one.item, one.path) for side in (this, other)]
            needed = sum(part.stored_bytes for part in parts)
            if read and read + needed > most:
                break
            more = _values(parts[0], parts[1], needed, most)
            told = told.model_copy(update=more)
            read += 0 if "not_compared" in more else needed
        page.append(told)
    return page


def _values(this: TensorPart, other: TensorPart, needed: int, most: float) -> dict[str, Any]:
    """How the values of a leaf differ, or why they were not compared."""
    if needed > most:
        why = f"{needed} bytes: an answer reads {most} at most"
        return {"not_compared": f"{why}; use `cairn diff` where the store is"}
    if math.isfinite(most) and this.held_bytes + other.held_bytes > COMPARED_HELD_BYTES:
        largest = max(this.chunk_bytes, other.chunk_bytes)
        why = f"chunks of {largest} bytes are too large for an answer"
        return {"not_compared": f"{why}; use `cairn diff` where the store is"}
    found = reading.diff_values(this, other)
    if found is None:
        return {"not_compared": f"no numbers hold both {this.dtype.name} and {other.dtype.name}"}
    change = found.change
    return {
        "values": ValueDifference(
            elements=change.count,
            differing=found.differing,
            not_finite=change.nan + change.positive_infinity + change.negative_infinity,
            max_absolute=found.max_absolute,
            mean=change.mean,
            norm=None if change.norm is None else json_number(change.norm),
            relative=found.relative,
        )
    }


def _config(side: Side) -> dict[str, Any]:
    return {} if side.manifest.model is None else side.manifest.model.config


def _entries(this: dict[str, Any], other: dict[str, Any]) -> list[EntryDifference]:
    return [EntryDifference(**asdict(one)) for one in reading.diff_entries(this, other)]
