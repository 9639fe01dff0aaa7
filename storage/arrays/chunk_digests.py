"""Digests of an item's chunks, in a file per process that wrote some of them.

A file has the digests of the chunks that its process wrote; the files of all processes together
cover the item. The step's manifest lists them with their checksums.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from cairn.storage.arrays import digests
from cairn.storage.errors import CorruptionError
from cairn.storage.store.bounds import check_json_size

__all__ = ["FILE_PREFIX", "ChunkDigests", "DigestedBox"]

FILE_PREFIX: Final = "chunk_digests.process_"
"""Prefix of the files with digests in an item's folder; the process's number and ".json" follow."""

_FORMAT: Final = "cairn.chunk_digests"
_VERSION: Final = 1
_HEX_DIGITS: Final = 16


@dataclass(frozen=True, eq=False)
class DigestedBox:
    """Digests of a box of a leaf's chunks.

    Attributes:
        origin: index of the box's first element in the leaf.
        counts: number of chunks per axis; chunks at the leaf's end may be smaller.
        digests: one for each chunk, of shape `counts`.
    """

    origin: tuple[int, ...]
    counts: tuple[int, ...]
    digests: np.ndarray[Any, np.dtype[np.uint64]]


class ChunkDigests:
    """Digests of an item's chunks, by the leaf's path."""

    def __init__(self, boxes: Mapping[str, Sequence[DigestedBox]] | None = None) -> None:
        """Create it from boxes of each leaf, by path; boxes without chunks are left out.

        Raises:
            CorruptionError: two boxes of a leaf begin at the same element, or do not have the
                same axes.
        """
        self._boxes = {
            path: tuple(box for box in leaf_boxes if math.prod(box.counts))
            for path, leaf_boxes in (boxes or {}).items()
        }
        self._corners: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for path, leaf_boxes in self._boxes.items():
            if len(leaf_boxes) == 1 and len(leaf_boxes[0].origin) == len(leaf_boxes[0].counts):
                continue
            origins = {box.origin for box in leaf_boxes}
            ranks = {len(part) for box in leaf_boxes for part in (box.origin, box.counts)}
            if len(origins) < len(leaf_boxes) or len(ranks) > 1:
                raise CorruptionError(
                    "digests of a leaf that contradict each other",
                    path=path,
                    expected="each chunk once",
                    found=f"{len(leaf_boxes)} boxes at {len(origins)} places",
                    next_step="Restore the step's files, or use another step.",
                )

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the leaves with a digest of at least one chunk."""
        return frozenset(path for path, boxes in self._boxes.items() if boxes)

    def to_bytes(self) -> bytes:
        """Return the content of a file with the digests."""
        leaves = {
            path: [
                {
                    "origin": list(box.origin),
                    "counts": list(box.counts),
                    "digests": np.ascontiguousarray(box.digests, "<u8").tobytes().hex(),
                }
                for box in boxes
            ]
            for path, boxes in sorted(self._boxes.items())
        }
        body = {"format": _FORMAT, "version": _VERSION, "leaves": leaves}
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes, *, path: object) -> ChunkDigests:
        """Return the digests of a file whose content `to_bytes` returned.

        Args:
            data: content of the file.
            path: name of the file, for errors.

        Raises:
            CorruptionError: the content is not that of such a file.
        """
        check_json_size(data, path)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            _refuse(path, "no JSON")
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            _refuse(path, "JSON of another kind")
        if body.get("version") is True or body.get("version") != _VERSION:
            _refuse(path, f"version {body.get('version')!r}")
        leaves = body.get("leaves")
        if not isinstance(leaves, dict):
            _refuse(path, "no leaves")
        boxes = {}
        for leaf, records in leaves.items():
            if not isinstance(records, list):
                _refuse(path, f"no boxes of {leaf}")
            try:
                boxes[leaf] = [_box_of(record) for record in records]
            except (TypeError, KeyError, ValueError) as exc:
                _refuse(path, f"a damaged box of {leaf}: {exc}")
        try:
            return cls(boxes)
        except CorruptionError as exc:
            _refuse(path, str(exc))

    def merged(self, *others: ChunkDigests) -> ChunkDigests:
        """Return the digests of this object and of `others` together.

        Raises:
            CorruptionError: two of them have digests of the same chunk.
        """
        boxes = {path: list(leaf_boxes) for path, leaf_boxes in self._boxes.items()}
        for other in others:
            for path, leaf_boxes in other._boxes.items():
                boxes.setdefault(path, []).extend(leaf_boxes)
        return ChunkDigests(boxes)

    def total(self, path: str) -> int | None:
        """Return the digest of a whole leaf; None if it has no digests here."""
        boxes = self._boxes.get(path)
        if not boxes:
            return None
        if len(boxes) == 1 and boxes[0].digests.size == 1:
            return int(boxes[0].digests.item())
        return sum(digests.total(box.digests) for box in boxes) % 2**64

    def expected(self, path: str, chunks: Sequence[int], index: tuple[int, ...]) -> int | None:
        """Return the digest of a chunk; None if there is not exactly one.

        Args:
            path: path of the leaf.
            chunks: the leaf's chunk shape, in elements.
            index: the chunk's index in the leaf's grid of chunks.
        """
        boxes = self._boxes.get(path)
        if not boxes or len(chunks) != len(boxes[0].origin) or len(index) != len(chunks):
            return None
        if len(boxes) == 1 and boxes[0].digests.size == 1:
            begins = tuple(map(operator.mul, index, chunks))
            return int(boxes[0].digests.item()) if begins == boxes[0].origin else None
        if path not in self._corners:
            self._corners[path] = (
                np.array([box.origin for box in boxes], np.int64).reshape(len(boxes), -1),
                np.array([box.counts for box in boxes], np.int64).reshape(len(boxes), -1),
            )
        origins, counts = self._corners[path]
        grid = np.asarray(chunks, np.int64)
        inside = np.asarray(index, np.int64) * grid - origins
        contains = ((inside >= 0) & (inside < counts * grid) & (inside % grid == 0)).all(axis=1)
        (at,) = np.nonzero(contains)
        if len(at) != 1:
            return None
        return int(boxes[at[0]].digests[tuple(inside[at[0]] // grid)])


def _box_of(record: Any) -> DigestedBox:
    for name in ("origin", "counts"):
        numbers = record[name]
        if not isinstance(numbers, list) or not all(
            type(number) is int and 0 <= number < 2**63 for number in numbers
        ):
            raise ValueError(f"{str(numbers)[:80]} where natural numbers belong")
    origin, counts, text = tuple(record["origin"]), tuple(record["counts"]), record["digests"]
    if len(origin) != len(counts) or 0 in counts:
        raise ValueError(f"origin {list(origin)}, counts {list(counts)}")
    if len(text) != _HEX_DIGITS * math.prod(counts):
        raise ValueError(f"{len(text)} digits for {math.prod(counts)} chunks")
    box_digests = np.frombuffer(bytes.fromhex(text), "<u8").astype(np.uint64, copy=False)
    return DigestedBox(origin, counts, box_digests.reshape(counts))


def _refuse(path: object, found: str) -> NoReturn:
    raise CorruptionError(
        "no digests of chunks",
        path=path,
        expected=f"{_FORMAT} version {_VERSION}",
        found=found,
        next_step="Restore the step's files, or use another step.",
    )
