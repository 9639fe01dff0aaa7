"""Part of a leaf for other tools: as an npy or safetensors file, as JSON, or its statistics.

All values come from `CheckpointReader`, which compares them with their digests.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Final, Literal

import numpy as np

from cairn.storage.arrays.boxes import MAX_CHUNK_ROW_BYTES
from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.arrays.statistics import RunningStatistics, Statistics
from cairn.storage.errors import InvalidSliceError, UnsupportedLeafError
from cairn.storage.reading.array_index import explicit_index
from cairn.storage.reading.block_stream import in_flight_bytes
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.safetensors.format import DTYPES, encode_header

__all__ = [
    "MOST_CHUNK_BYTES",
    "MOST_JSON_VALUES",
    "MOST_READ_BYTES",
    "MOST_STATISTICS_BYTES",
    "MOST_STEPPED_BYTES",
    "TensorFile",
    "TensorPart",
    "json_number",
    "parse_slice",
]

BLOCK_BYTES: Final = 4 << 20

MOST_STATISTICS_BYTES: Final = 4 << 30
"""Most bytes of chunks that one request for statistics may read."""

MOST_STEPPED_BYTES: Final = 64 << 20
"""Most bytes of a part with steps, which is read into memory as a whole."""

MOST_READ_BYTES: Final = 256 << 20
"""Most bytes of chunks that one request for values may read into memory."""

MOST_CHUNK_BYTES: Final = 256 << 20
"""Most bytes of a chunk that a server reads: it is decoded whole for any part of it."""

MOST_JSON_VALUES: Final = 1 << 16
"""Most values in JSON, which people read."""

_LARGEST: Final = 2**53 - 1  # every JSON reader keeps integers up to this exactly

_NUMBER: Final = r"-?[0-9]{1,18}"
_POSITION: Final = re.compile(_NUMBER)
_SLICE: Final = re.compile(rf"({_NUMBER})?:({_NUMBER})?(?::({_NUMBER})?)?")

_Part = int | slice | EllipsisType


def json_number(value: int | float) -> int | float | str:
    """Return a number for JSON; as text if JSON readers would change it.

    That is so for numbers that are not finite, and for integers beyond 2**53 - 1.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if abs(value) <= _LARGEST else str(value)


def parse_slice(text: str, *, path: object) -> tuple[_Part, ...]:
    """Return the parsed text of a NumPy index, such as "0:10, :, 3" or "..., -1".

    Args:
        text: the index; "" selects all.
        path: the leaf, for errors.

    Raises:
        InvalidSliceError: the text is not such an index.
    """
    parts = [_parsed(part.strip()) for part in text.split(",")] if text.strip() else []
    if None in parts or parts.count(...) > 1:
        raise InvalidSliceError(
            "no slice",
            path=path,
            expected='numbers, slices such as 0:10 or ::2, and one "...", with commas between',
            found=repr(text)[:200],
            next_step="Write it as NumPy does, without the brackets.",
        )
    return tuple(part for part in parts if part is not None)


def _parsed(text: str) -> _Part | None:
    if text == "...":
        return ...
    if _POSITION.fullmatch(text):
        return int(text)
    match = _SLICE.fullmatch(text)
    return match and slice(*(None if bound is None else int(bound) for bound in match.groups()))


@dataclass(frozen=True)
class TensorFile:
    """File that is generated while it is read.

    Attributes:
        nbytes: size of the file.
        blocks: yields the file from its beginning, in blocks of some MiB. If it raises, the file
            can't be completed.
    """

    nbytes: int
    blocks: Callable[[], Iterator[bytes]]


@dataclass(frozen=True)
class TensorPart:
    """Part of a leaf that was not read yet. Create it by `of`.

    Attributes:
        reader: reader of the step.
        item: the leaf's item.
        path: the leaf's path.
        index: one position, or slice with bounds, per axis of the leaf.
        shape: shape of the part; () for a single element.
        dtype: dtype of its elements; for typed PRNG keys that is uint32, their words.
        chunks: shape of the smallest part that can be read; () if nothing is stored.
        stored_bytes: bytes of the chunks that must be read for the part.
    """

    reader: CheckpointReader
    item: str
    path: str
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    stored_bytes: int

    @classmethod
    def of(cls, reader: CheckpointReader, item: str, path: str, text: str = "") -> TensorPart:
        """Return the part of a leaf that a text selects, see `parse_slice`; steps must be positive.

        Raises:
            LeafNotFoundError: the step has no such item or leaf.
            InvalidSliceError: the text is not a slice, or leads out of the leaf.
            CorruptionError: the leaf's description is damaged, or is not the manifest's.
            StoreUnavailableError: the store gives no answer.
        """
        info = reader.leaf(item, path)
        where = f"{reader.uri / item}: {path}"
        index = explicit_index(parse_slice(text, path=where), info.shape, path=where)
        shape = tuple(len(_range(part)) for part in index if isinstance(part, slice))
        stored = _touched(index, info.chunks) * info.dtype.itemsize
        return cls(reader, item, path, index, shape, info.dtype, info.chunks or (), stored)

    @property
    def where(self) -> str:
        """Name of the leaf in errors."""
        return f"{self.reader.uri / self.item}: {self.path}"

    @property
    def nbytes(self) -> int:
        """Bytes of the part in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize if self.chunks else 0

    @property
    def held_bytes(self) -> int:
        """Most bytes of memory that reading the part takes, for any use: pieces and a band."""
        pieces = min(2 * self.stored_bytes, in_flight_bytes(self.chunk_bytes))
        return min(self.stored_bytes, MAX_CHUNK_ROW_BYTES) + pieces

    def values(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the part's values.

        Raises:
            CorruptionError: stored bytes are missing, fail their check or are not what was saved.
            StoreUnavailableError: the store gives no answer.
        """
        return self.reader.read(self.item, self.path, self.index).reshape(self.shape)

    def file(self, kind: Literal["npy", "safetensors"]) -> TensorFile:
        """Return the part as a file, which is generated in bounded memory while it is read.

        Raises:
            UnsupportedLeafError: such a file can't hold this dtype.
            InvalidSliceError: the part has steps, and is too large for that.
        """
        self._require_room()
        head = self._npy_head() if kind == "npy" else self._safetensors_head()

        def blocks() -> Iterator[bytes]:
            yield head
            for block in self.blocks():
                yield block.tobytes()

        return TensorFile(len(head) + self.nbytes, blocks)

    def plain(self) -> Any:
        """Return the values as nested lists for JSON, each value exact.

        Values that JSON readers would not keep become text: "nan", "inf", "-inf", and integers
        beyond 2**53 - 1.

        Raises:
            UnsupportedLeafError: the elements are complex.
            InvalidSliceError: there are too many values, or they lie in too many chunks.
            CorruptionError, StoreUnavailableError: as `values`.
        """
        count = math.prod(self.shape)
        if count > MOST_JSON_VALUES:
            raise InvalidSliceError(
                "too many values for JSON",
                path=self.where,
                expected=f"at most {MOST_JSON_VALUES} elements",
                found=f"{count}, a part of {list(self.shape)}",
                next_step="Ask for a smaller slice, or for another format.",
            )
        if self.stored_bytes > MOST_READ_BYTES:
            raise InvalidSliceError(
                "too many chunks for JSON",
                path=self.where,
                expected=f"a part that lies in chunks of {MOST_READ_BYTES} bytes together",
                found=f"{self.stored_bytes} bytes",
                next_step=f"Ask for less of it; a chunk is {list(self.chunks)}.",
            )
        if self.dtype.kind == "c":
            raise self._unsupported("JSON", ["bool", "integers", "floating"])
        values = self.values().reshape(-1)
        listed: list[Any]
        if is_floating(self.dtype):
            with np.errstate(invalid="ignore"):  # a signaling NaN would warn
                listed = values.astype(np.float64).tolist()
            listed = [json_number(number) for number in listed]
        elif self.dtype == np.bool_:
            listed = values.tolist()
        else:
            listed = values.astype(self.dtype if self.dtype.isbuiltin == 1 else np.int64).tolist()
            listed = [json_number(number) for number in listed]
        # As objects, so that texts and numbers can be nested in the part's shape.
        flat = np.empty(count, object)
        flat[:] = listed
        return flat.reshape(self.shape).tolist()

    def blocks(self) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
        """Return an iterator over the elements in C order, some MiB at a time.

        Raises:
            CorruptionError, StoreUnavailableError: as `values`.
        """
        if 0 in self.shape:
            return iter(())
        if self._has_steps:
            flat, count = self.values().reshape(-1), BLOCK_BYTES // self.dtype.itemsize
            return (flat[start : start + count] for start in range(0, flat.size, count))
        return self.reader.iter_blocks(
            self.item, self.path, max_bytes=BLOCK_BYTES, index=self.index
        )

    def statistics(self) -> Statistics:
        """Return the statistics of the elements, computed in bounded memory.

        Raises:
            UnsupportedLeafError: the elements are complex, and so have no order.
            InvalidSliceError: the part has steps, and is too large for that.
            CorruptionError, StoreUnavailableError: as `values`.
        """
        self._require_room()
        if self.dtype.kind == "c":
            raise UnsupportedLeafError(
                "complex numbers have no order",
                path=self.where,
                expected="bool, integers or floating numbers",
                found=self.dtype.name,
                next_step="Ask for its values, with format=npy.",
            )
        running = RunningStatistics(self.dtype)
        if 0 in self.shape or self._has_steps:
            pieces = self.blocks()
        else:  # in any order
            pieces = self.reader.iter_pieces(self.item, self.path, index=self.index)
        for piece in pieces:  # the next ones are read, and decoded, meanwhile
            running.add(piece)
        return running.result()

    @property
    def _has_steps(self) -> bool:
        return any(isinstance(part, slice) and part.step != 1 for part in self.index)

    def _require_room(self) -> None:
        if self._has_steps and self.nbytes > MOST_STEPPED_BYTES:
            raise InvalidSliceError(
                "too large a part with steps",
                path=self.where,
                expected=f"at most {MOST_STEPPED_BYTES} bytes",
                found=f"{self.nbytes}, a part of {list(self.shape)}",
                next_step="Ask for smaller parts one after another, or without steps.",
            )

    def _npy_head(self) -> bytes:
        if self.dtype.isbuiltin != 1:
            names = ["bool", "int8 to int64", "uint8 to uint64", "float16 to float64", "complex"]
            raise self._unsupported("an npy file", names)
        head = io.BytesIO()
        described = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(head, described)
        return head.getvalue()

    def _safetensors_head(self) -> bytes:
        if self.dtype not in DTYPES.values():
            names = sorted(dtype.name for dtype in DTYPES.values())
            raise self._unsupported("a safetensors file", names)
        return encode_header([(self.path or "tensor", self.dtype, self.shape)], {})

    def _unsupported(self, what: str, supported: list[str]) -> UnsupportedLeafError:
        formats = {
            "format=npy": self.dtype.isbuiltin == 1,
            "format=safetensors": self.dtype in DTYPES.values(),
            "format=json": self.dtype.kind != "c",
        }
        return UnsupportedLeafError(
            f"{what} has no such dtype",
            path=self.where,
            expected=f"one of {', '.join(supported)}",
            found=self.dtype.name,
            next_step=f"Ask for {' or '.join(name for name, has in formats.items() if has)}.",
        )


def _touched(index: tuple[int | slice, ...], chunks: tuple[int, ...] | None) -> int:
    """Return the number of elements in the chunks that hold a part; 0 if nothing is stored."""
    if chunks is None:
        return 0
    counts = []
    for part, chunk in zip(index, chunks, strict=True):
        requested = range(part, part + 1) if isinstance(part, int) else _range(part)
        if not requested:
            return 0
        spanned = requested[-1] // chunk - requested[0] // chunk + 1
        counts.append(min(len(requested), spanned) * chunk)
    return math.prod(counts)


def _range(part: slice) -> range:
    return range(part.start, part.stop, part.step)
