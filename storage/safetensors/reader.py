"""Reads safetensors files from any store: the header, and tensors or parts of them by range."""

from __future__ import annotations

import math

import numpy as np

from cairn.storage.errors import CorruptionError, InvalidSliceError, LeafNotFoundError
from cairn.storage.safetensors.format import (
    LENGTH_BYTES,
    SafetensorsHeader,
    TensorEntry,
    decode_header,
    header_length,
)
from cairn.storage.store import Files

__all__ = ["read_elements", "read_header", "read_tensor"]


def read_header(files: Files, rel: str) -> SafetensorsHeader:
    """The header of the file `rel`, every claim in it checked against the file's size.

    Raises:
        NotFoundError: there is no such file.
        CorruptionError: it is not a valid safetensors file.
        UnsupportedFormatError: it has a tensor of an unknown dtype.
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
    """One tensor of the file `rel`, or some of its rows; nothing else of the file is read.

    Args:
        files: the store's folder.
        rel: the file's name in it.
        name: the tensor's name.
        header: as `read_header` gave it, to save reading it again.
        rows: first and last-but-one index of the first axis; None: all.

    Raises:
        NotFoundError: there is no such file (LeafNotFoundError: or tensor).
        InvalidSliceError: `rows` lie outside.
        CorruptionError: the file is not valid, or shorter than its header says.
        UnsupportedFormatError: a dtype that NumPy does not have.
        StoreUnavailableError: the store gives no answer.
    """
    entry = _entry(files, rel, name, header)
    shape, first, last = _part(entry, rows, f"{files.uri}/{rel}")
    # A copy of its own: callers may write into it.
    return np.array(_numbers(files, rel, entry, first, last)).reshape(shape)


def read_elements(
    files: Files, rel: str, name: str, first: int, last: int, *, header: SafetensorsHeader
) -> np.ndarray:
    """Numbers of one tensor that follow each other in C order; nothing else of the file is read.

    Args:
        files: the store's folder.
        rel: the file's name in it.
        name: the tensor's name.
        first: index of the first number.
        last: index behind the last one.
        header: as `read_header` gave it.

    Returns:
        An array of one axis that can't be written into.

    Raises:
        NotFoundError: there is no such file (LeafNotFoundError: or tensor).
        InvalidSliceError: the tensor has not so many.
        CorruptionError: the file is shorter than its header says.
        UnsupportedFormatError: a dtype that NumPy does not have.
        StoreUnavailableError: the store gives no answer.
    """
    entry = _entry(files, rel, name, header)
    count = math.prod(entry.shape)
    if not 0 <= first <= last <= count:
        raise InvalidSliceError(
            "no such numbers",
            path=f"{files.uri}/{rel}: {name}",
            expected=f"numbers within {count}",
            found=f"{first} to {last}",
            next_step="Correct the range.",
        )
    return _numbers(files, rel, entry, first, last)


def _entry(files: Files, rel: str, name: str, header: SafetensorsHeader | None) -> TensorEntry:
    known = (header or read_header(files, rel)).tensors
    if name not in known:
        raise LeafNotFoundError(
            "no such tensor",
            path=f"{files.uri}/{rel}",
            expected=f"one of its {len(known)} tensors",
            found=repr(name),
            next_step="List the header's tensors.",
        )
    return known[name]


def _numbers(files: Files, rel: str, entry: TensorEntry, first: int, last: int) -> np.ndarray:
    size = entry.dtype.itemsize
    start, end = entry.start + first * size, entry.start + last * size
    data = files.read_range(rel, start, end) if end > start else b""
    if len(data) != end - start:
        raise _short(f"{files.uri}/{rel}: {entry.name}", end - start, len(data))
    return np.frombuffer(data, dtype=np.uint8).view(entry.dtype)


def _part(
    entry: TensorEntry, rows: tuple[int, int] | None, path: str
) -> tuple[tuple[int, ...], int, int]:
    """Shape of the rows of a tensor, index of their first number, and index behind the last."""
    if rows is None:
        return entry.shape, 0, math.prod(entry.shape)
    low, high = rows
    if not entry.shape or not 0 <= low <= high <= entry.shape[0]:
        raise InvalidSliceError(
            "no such rows",
            path=f"{path}: {entry.name}",
            expected=f"rows within {entry.shape}",
            found=f"{low} to {high}",
            next_step="Correct the range.",
        )
    row = math.prod(entry.shape[1:])
    return (high - low, *entry.shape[1:]), low * row, high * row


def _short(path: str, expected: int, found: int) -> CorruptionError:
    return CorruptionError(
        "the file ends early",
        path=path,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
        next_step="Get or export the file again.",
    )
