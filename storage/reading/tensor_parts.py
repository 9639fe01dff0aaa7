"""A part of a leaf for other tools: as an npy or safetensors file, for JSON, its statistics.

No JAX. What is given out was read by `CheckpointReader`, and so was compared with its digests.
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

from cairn.storage.arrays import BAND_BYTES, RunningStatistics, Statistics, is_floating
from cairn.storage.errors import InvalidSliceError, UnsupportedLeafError
from cairn.storage.reading.array_index import explicit_index
from cairn.storage.reading.block_stream import in_flight_bytes
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.safetensors import DTYPES, encode_header

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
"""Of the chunks whose statistics are to be had at once."""

MOST_STEPPED_BYTES: Final = 64 << 20
"""A part with steps is held whole."""

MOST_READ_BYTES: Final = 256 << 20
"""Of the chunks that hold a part which is to be had at once."""

MOST_CHUNK_BYTES: Final = 256 << 20
"""Of one chunk that an answer of a server reads: it is decoded whole, whatever is wanted of it."""

MOST_JSON_VALUES: Final = 1 << 16
"""JSON is for looking at."""

_LARGEST: Final = 2**53 - 1  # what every JSON reader keeps exactly

_NUMBER: Final = r"-?[0-9]{1,18}"
_POSITION: Final = re.compile(_NUMBER)
_SLICE: Final = re.compile(rf"({_NUMBER})?:({_NUMBER})?(?::({_NUMBER})?)?")

_Part = int | slice | EllipsisType


def json_number(value: int | float) -> int | float | str:
    """A number that JSON's readers keep: text if it is not finite, or an integer beyond theirs."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if abs(value) <= _LARGEST else str(value)


def parse_slice(text: str, *, path: object) -> tuple[_Part, ...]:
    """The index that NumPy writes so between brackets, such as "0:10, :, 3" or "..., -1".

    Args:
        text: "" is all.
        path: the leaf, for errors.

    Raises:
        InvalidSliceError: it is another text.
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
    found = _SLICE.fullmatch(text)
    return found and slice(*(None if one is None else int(one) for one in found.groups()))


@dataclass(frozen=True)
class TensorFile:
    """A file that is made while it is read.

    Attributes:
        nbytes: of all of it.
        blocks: makes it, in blocks of some MiB, from its beginning. An error among them says that
            what is left can't be had.
    """

    nbytes: int
    blocks: Callable[[], Iterator[bytes]]


@dataclass(frozen=True)
class TensorPart:
    """A part of a leaf that was not read yet. Made by `of`.

    Attributes:
        reader: of its step.
        item: the leaf's.
        path: the leaf's.
        index: one position, or slice with bounds, per axis of the leaf.
        shape: of the part; () for a single element.
        dtype: of its elements. Typed PRNG keys are the uint32 words that they hold.
        chunks: shape of the smallest part that can be read; () if nothing is stored.
        stored_bytes: of the chunks that hold it, and that must be read for it.
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
        """The part that a text names, see `parse_slice`; steps must be positive.

        Raises:
            LeafNotFoundError: the step has no such item or leaf.
            InvalidSliceError: the text is no slice, or leads out of the leaf.
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
        """How errors name the leaf."""
        return f"{self.reader.uri / self.item}: {self.path}"

    @property
    def nbytes(self) -> int:
        """Bytes of the part in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, once it is decoded."""
        return math.prod(self.chunks) * self.dtype.itemsize if self.chunks else 0

    @property
    def held_bytes(self) -> int:
        """Memory that reading it takes at a time, whatever is made of it: pieces and a band."""
        pieces = min(2 * self.stored_bytes, in_flight_bytes(self.chunk_bytes))
        return min(self.stored_bytes, BAND_BYTES) + pieces

    def values(self) -> np.ndarray[Any, np.dtype[Any]]:
        """All of it.

        Raises:
            CorruptionError: stored bytes are missing, fail their check or are not what was saved.
            StoreUnavailableError: the store gives no answer.
        """
        return self.reader.read(self.item, self.path, self.index).reshape(self.shape)

    def file(self, kind: Literal["npy", "safetensors"]) -> TensorFile:
        """It as a file, read in bounded memory while that is made.

        Raises:
            UnsupportedLeafError: such a file does not hold this dtype.
            InvalidSliceError: it has steps, and is too large for it.
        """
        self._require_room()
        head = self._npy_head() if kind == "npy" else self._safetensors_head()

        def blocks() -> Iterator[bytes]:
            yield head
            for block in self.blocks():
                yield block.tobytes()

        return TensorFile(len(head) + self.nbytes, blocks)

    def plain(self) -> Any:
        """Its values as nested lists that JSON can hold, each of them exact.

        What JSON's readers would not keep is text: "nan", "inf", "-inf", and integers beyond
        2**53 - 1.

        Raises:
            UnsupportedLeafError: the elements are complex.
            InvalidSliceError: there are too many, or they lie in too many chunks.
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
            with np.errstate(invalid="ignore"):  # a NaN may be a signaling one
                listed = values.astype(np.float64).tolist()
            listed = [json_number(one) for one in listed]
        elif self.dtype == np.bool_:
            listed = values.tolist()
        else:
            listed = values.astype(self.dtype if self.dtype.isbuiltin == 1 else np.int64).tolist()
            listed = [json_number(one) for one in listed]
        flat = np.empty(count, object)
        flat[:] = listed
        return flat.reshape(self.shape).tolist()

    def blocks(self) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
        """The elements in C order, some MiB at a time.

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
        """Of its elements, read in bounded memory.

        Raises:
            UnsupportedLeafError: the elements are complex, and so have no order.
            InvalidSliceError: it has steps, and is too large for it.
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
        for piece in self._pieces():  # the next ones are read, and decoded, meanwhile
            running.add(piece)
        return running.result()

    def _pieces(self) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
        """The elements in any order."""
        if 0 in self.shape or self._has_steps:
            return self.blocks()
        return self.reader.iter_pieces(self.item, self.path, index=self.index)

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
            known = sorted(one.name for one in DTYPES.values())
            raise self._unsupported("a safetensors file", known)
        return encode_header([(self.path or "tensor", self.dtype, self.shape)], {})

    def _unsupported(self, what: str, known: list[str]) -> UnsupportedLeafError:
        formats = {
            "format=npy": self.dtype.isbuiltin == 1,
            "format=safetensors": self.dtype in DTYPES.values(),
            "format=json": self.dtype.kind != "c",
        }
        return UnsupportedLeafError(
            f"{what} has no such dtype",
            path=self.where,
            expected=f"one of {', '.join(known)}",
            found=self.dtype.name,
            next_step=f"Ask for {' or '.join(name for name, has in formats.items() if has)}.",
        )


def _touched(index: tuple[int | slice, ...], chunks: tuple[int, ...] | None) -> int:
    """Elements of the chunks that hold a part; 0 if nothing is stored."""
    if chunks is None:
        return 0
    counts = []
    for part, chunk in zip(index, chunks, strict=True):
        wanted = range(part, part + 1) if isinstance(part, int) else _range(part)
        if not wanted:
            return 0
        spanned = wanted[-1] // chunk - wanted[0] // chunk + 1
        counts.append(min(len(wanted), spanned) * chunk)
    return math.prod(counts)


def _range(part: slice) -> range:
    return range(part.start, part.stop, part.step)
