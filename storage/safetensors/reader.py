"""Reads safetensors files from any store: the header, and single tensors by range."""

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

__all__ = ["read_header", "read_tensor"]


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
    path = f"{files.uri}/{rel}"
    known = (header or read_header(files, rel)).tensors
    if name not in known:
        raise LeafNotFoundError(
            "no such tensor",
            path=path,
            expected=f"one of its {len(known)} tensors",
            found=repr(name),
            next_step="List the header's tensors.",
        )
    entry = known[name]
    dtype = entry.dtype
    shape, start, end = _part(entry, rows, path)
    data = files.read_range(rel, start, end) if end > start else b""
    if len(data) != end - start:
        raise _short(f"{path}: {name}", end - start, len(data))
    # A copy of its own: callers may write into it.
    return np.frombuffer(bytearray(data), dtype=np.uint8).view(dtype).reshape(shape)


def _part(
    entry: TensorEntry, rows: tuple[int, int] | None, path: str
) -> tuple[tuple[int, ...], int, int]:
    """Shape, first byte and end of the rows of a tensor."""
    if rows is None:
        return entry.shape, entry.start, entry.end
    low, high = rows
    if not entry.shape or not 0 <= low <= high <= entry.shape[0]:
        raise InvalidSliceError(
            "no such rows",
            path=f"{path}: {entry.name}",
            expected=f"rows within {entry.shape}",
            found=f"{low} to {high}",
            next_step="Correct the range.",
        )
    row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    shape = (high - low, *entry.shape[1:])
    return shape, entry.start + low * row_bytes, entry.start + high * row_bytes


def _short(path: str, expected: int, found: int) -> CorruptionError:
    return CorruptionError(
        "the file ends early",
        path=path,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
        next_step="Get or export the file again.",
    )
