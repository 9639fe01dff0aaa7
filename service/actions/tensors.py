"""Leaves of a checkpoint, and parts of their values."""

import hashlib
from typing import Final

from cairn.service.actions.caches import LeafSummary, OpenStep
from cairn.service.actions.plane import ControlPlane
from cairn.service.schemas import Histogram, Tensor, TensorStatistics, TensorValues
from cairn.storage.arrays import statistics
from cairn.storage.errors import InvalidSliceError, LeafNotFoundError
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.reading.tensor_parts import (
    MOST_CHUNK_BYTES,
    MOST_STATISTICS_BYTES,
    TensorPart,
    json_number,
)

_MODEL: Final = "model"  # the item that is meant where none is named


def open_step(plane: ControlPlane, root: str, run: str, step: int) -> OpenStep:
    """Open a listed step.

    Raises:
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        CorruptionError: Its manifest or its index is unreadable.
        StoreUnavailableError: The store does not answer.
    """
    stored_run = plane.run(root, run)
    return plane.steps.open(stored_run, stored_run.step(step))


def item_of(step: OpenStep, item: str | None) -> str:
    """Return the item to read a leaf of: by default `model`, or else the only one with arrays.

    Raises:
        LeafNotFoundError: No item is given, and the step has several, none of them `model`.
    """
    if item is not None or _MODEL in step.manifest.items:
        return item or _MODEL
    if len(step.array_items) != 1:
        raise LeafNotFoundError(
            "the item is not given",
            path=step.uri,
            expected=f"one of {', '.join(step.array_items) or 'no items: none holds arrays'}",
            found="none",
            next_step="Add `--item NAME` to the command, or `item=NAME` to the request.",
        )
    return step.array_items[0]


def open_part(reader: CheckpointReader, item: str, path: str, text: str = "") -> TensorPart:
    """Return a part of a leaf that is small enough to answer with; its values are not read yet.

    Args:
        reader: Reader of the step.
        item: Item of the leaf.
        path: Path of the leaf.
        text: Slice; see `TensorPart.of`.

    Raises:
        LeafNotFoundError: The step has no such item or leaf.
        InvalidSliceError: The text is no slice, or is out of bounds, or the leaf's chunks are too
            large for an answer.
        CorruptionError: The leaf's description is damaged.
        StoreUnavailableError: The store does not answer.
    """
    part = TensorPart.of(reader, item, path, text)
    if part.chunk_bytes > MOST_CHUNK_BYTES:
        raise InvalidSliceError(
            "too large a chunk for an answer",
            path=part.where,
            expected=f"chunks of at most {MOST_CHUNK_BYTES} bytes",
            found=f"{part.chunk_bytes} bytes, a chunk of {list(part.chunks)}",
            next_step="Read it where the store is, with `cairn tensors`, or download the step.",
        )
    return part


def list_tensors(
    step: OpenStep, *, item: str | None, prefix: str, after: int, limit: int
) -> tuple[list[Tensor], bool]:
    """Return the next leaves of a step, by item and path, and whether there are more.

    Args:
        step: Step to list.
        item: Only leaves of this item; None: of all.
        prefix: Only leaves whose path begins with this text.
        after: Number of these leaves that the client has.
        limit: Largest number of leaves.

    Raises:
        LeafNotFoundError: The step has no such item.
    """
    leaves = step.leaves
    if item is not None:
        items = {*step.manifest.items, *(leaf.item for leaf in leaves)}
        if item not in items:
            raise LeafNotFoundError(
                "no such item",
                path=step.uri,
                expected=f"one of {sorted(items)}",
                found=repr(item),
                next_step="Ask for one of these.",
            )
        leaves = [leaf for leaf in leaves if leaf.item == item]
    if prefix:
        leaves = [leaf for leaf in leaves if leaf.path.startswith(prefix)]
    named = leaves[after : after + limit]
    page = [tensor_of(leaf.item, leaf.path, LeafSummary.of(leaf)) for leaf in named]
    return page, len(leaves) > after + limit


def version_of(step: OpenStep, *parameters: str) -> str:
    """Return the version of an answer about a saved step, for its ETag.

    A saved step never changes, and no other step has its manifest's digest.
    """
    text = "\0".join([str(step.uri), str(step.manifest_digest), *parameters])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tensor_values(part: TensorPart) -> TensorValues:
    """Read a part of a leaf, and return its values in the form of the API.

    Raises:
        InvalidSliceError: The part has too many values for JSON, or lies in too many chunks.
        UnsupportedLeafError: The values are complex numbers, which JSON cannot express.
        CorruptionError: Stored bytes are damaged.
        StoreUnavailableError: The store does not answer.
    """
    return TensorValues(
        item=part.item,
        path=part.path,
        dtype=part.dtype.name,
        shape=list(part.shape),
        values=part.plain(),
    )


def tensor_statistics(plane: ControlPlane, step: OpenStep, part: TensorPart) -> TensorStatistics:
    """Return statistics of a part of a leaf, from the cache if an equal part was read before.

    Raises:
        InvalidSliceError: Its chunks are too large for an answer, or the slice has steps and is too
            large.
        UnsupportedLeafError: Its elements have no order.
        CorruptionError: Stored bytes are damaged.
        StoreUnavailableError: The store does not answer.
    """
    leaf = step.leaf(part.item, part.path)
    digest = leaf.digest if leaf is not None else None
    content = (
        digest or (str(step.uri), step.manifest_digest, part.item, part.path),
        part.dtype.name,
        () if leaf is None else leaf.shape,
        repr(part.index),
    )
    return statistics_of(part, plane.statistics.get(content, lambda: _read_statistics(part)))


def statistics_of(part: TensorPart, values: statistics.Statistics) -> TensorStatistics:
    """Return statistics in the form of the API."""
    bins = values.histogram
    histogram = None
    if bins is not None:
        counts = list(bins.counts)
        histogram = Histogram(start=json_number(bins.start), width=float(bins.width), counts=counts)
    return TensorStatistics(
        item=part.item,
        path=part.path,
        dtype=part.dtype.name,
        shape=list(part.shape),
        count=values.count,
        nan=values.nan,
        positive_infinity=values.positive_infinity,
        negative_infinity=values.negative_infinity,
        zeros=values.zeros,
        min=None if values.min is None else json_number(values.min),
        max=None if values.max is None else json_number(values.max),
        mean=values.mean,
        std=values.std,
        norm=None if values.norm is None else json_number(values.norm),
        histogram=histogram,
    )


def _read_statistics(part: TensorPart) -> statistics.Statistics:
    if part.stored_bytes > MOST_STATISTICS_BYTES:
        raise InvalidSliceError(
            "too large for an answer",
            path=part.where,
            expected=f"a part that lies in chunks of {MOST_STATISTICS_BYTES} bytes together",
            found=f"{part.stored_bytes} bytes",
            next_step="Ask for a slice of it, or use `cairn tensors --stats` where the store is.",
        )
    return part.statistics()


def tensor_of(item: str, path: str, leaf: LeafSummary) -> Tensor:
    """Return a leaf in the form of the API."""
    form = leaf.form
    spec = [list(entry) if isinstance(entry, tuple) else entry for entry in form.spec or ()]
    return Tensor(
        item=item,
        path=path,
        shape=list(form.shape),
        dtype=form.dtype,
        bytes=form.nbytes,
        spec=None if form.spec is None else spec,
        digest=leaf.digest,
    )
