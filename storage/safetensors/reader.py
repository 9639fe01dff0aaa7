"""Reader of safetensors files in any store: the header, and ranges of tensors."""

from __future__ import annotations

import math

import numpy as np

from cairn.counts import count_text
from cairn.storage.errors import CorruptionError, InvalidSliceError, LeafNotFoundError
from cairn.storage.safetensors.format import (
    LENGTH_BYTES,
    SafetensorsHeader,
    TensorEntry,
    decode_header,
    header_length,
)
from cairn.storage.store.files import Files

__all__ = ["read_elements", "read_header", "read_tensor"]


def read_header(files: Files, rel: str) -> SafetensorsHeader:
    """Return the header of the file `rel`, checked against the file's size.

    Raises:
        NotFoundError: there is no such file.
        CorruptionError: the file is not a valid safetensors file.
        UnsupportedFormatError: the file has a tensor of an unknown dtype.
        StoreUnavailableError: the store gives no answer.
    """
    path = f"{files.uri}/{rel}"
    size = files.stat(rel).size
    length = header_length(files.read_range(rel, 0, LENGTH_BYTES), size, path=path)
    data = files.read_range(rel, LENGTH_BYTES, LENGTH_BYTES + length)
    if len(data) != length:
        raise _short(path, length, len(data))
    return decode_header(data, size, path=path)


def read_tensor(
    files: Files,
    rel: str,
    name: str,
    *,
    header: SafetensorsHeader | None = None,
    rows: tuple[int, int] | None = None,
) -> np.ndarray:
    """Return one tensor of the file `rel`, or some of its rows; nothing else of the file is read.

    Args:
        files: the store's folder.
        rel: the file's name in it.
        name: the tensor's name.
        header: result of `read_header`; None: it is read here.
        rows: indices of the first row, and of the row after the last; None: all rows.

    Raises:
        NotFoundError: there is no such file (LeafNotFoundError: no such tensor).
        InvalidSliceError: `rows` are outside of the tensor.
        CorruptionError: the file is not valid, or shorter than its header says.
        UnsupportedFormatError: a dtype that NumPy does not have.
        StoreUnavailableError: the store gives no answer.
    """
    entry = _entry(files, rel, name, header)
    shape, first = _part(entry, rows, f"{files.uri}/{rel}")
    out = np.empty(math.prod(shape), entry.dtype)
    _fill(files, rel, entry, first, out)
    return out.reshape(shape)


def read_elements(
    files: Files, rel: str, name: str, first: int, out: np.ndarray, *, header: SafetensorsHeader
) -> None:
    """Fill `out` with consecutive elements of one tensor; read nothing else.

    Args:
        files: the store's folder.
        rel: the file's name in it.
        name: the tensor's name.
        first: index of the first element, in C order.
        out: a contiguous array with one axis, of the tensor's dtype.
        header: result of `read_header`.

    Raises:
        NotFoundError: there is no such file (LeafNotFoundError: or tensor).
        InvalidSliceError: the tensor has too few elements, or another dtype.
        CorruptionError: the file is shorter than its header says.
        UnsupportedFormatError: a dtype that NumPy does not have.
        StoreUnavailableError: the store gives no answer.
    """
    entry = _entry(files, rel, name, header)
    count = math.prod(entry.shape)
    if not 0 <= first <= first + out.size <= count or out.dtype != entry.dtype:
        raise InvalidSliceError(
            "no such numbers",
            path=f"{files.uri}/{rel}: {name}",
            expected=f"a range within {count} of {entry.dtype}",
            found=f"{first} to {first + out.size} of {out.dtype}",
            next_step="Correct the range.",
        )
    _fill(files, rel, entry, first, out)


def _entry(files: Files, rel: str, name: str, header: SafetensorsHeader | None) -> TensorEntry:
    tensors = (header or read_header(files, rel)).tensors
    if name not in tensors:
        raise LeafNotFoundError(
            "no such tensor",
            path=f"{files.uri}/{rel}",
            expected=f"one of its {count_text(len(tensors), 'tensor')}",
            found=repr(name),
            next_step="List the header's tensors.",
        )
    return tensors[name]


def _fill(files: Files, rel: str, entry: TensorEntry, first: int, out: np.ndarray) -> None:
    if not out.size:
        return
    count = files.read_into(
        rel, entry.start + first * entry.dtype.itemsize, out.view(np.uint8).data
    )
    if count != out.nbytes:
        raise _short(f"{files.uri}/{rel}: {entry.name}", out.nbytes, count)


def _part(
    entry: TensorEntry, rows: tuple[int, int] | None, path: str
) -> tuple[tuple[int, ...], int]:
    """Return the shape of some rows of a tensor, and the index of their first element."""
    if rows is None:
        return entry.shape, 0
    low, high = rows
    if not entry.shape or not 0 <= low <= high <= entry.shape[0]:
        raise InvalidSliceError(
            "no such rows",
            path=f"{path}: {entry.name}",
            expected=f"rows within {entry.shape}",
            found=f"{low} to {high}",
            next_step="Correct the range.",
        )
    return (high - low, *entry.shape[1:]), low * math.prod(entry.shape[1:])


def _short(path: str, expected: int, found: int) -> CorruptionError:
    return CorruptionError(
        "the file ends early",
        path=path,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
        next_step="Get or export the file again.",
    )
