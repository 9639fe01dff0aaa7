"""The safetensors header: dtypes, layout, encoding, and decoding of untrusted bytes. No I/O.

A file consists of the header's length (u64, little endian); the header, a JSON object padded with
spaces so that the data starts at a multiple of 8; and the data, tensor after tensor without gaps.

Source: https://github.com/huggingface/safetensors (README, "Format"), and the limits of its
`tensor.rs`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from cairn.storage.errors import CorruptionError, UnsupportedFormatError, UnsupportedLeafError

__all__ = [
    "MAX_HEADER_BYTES",
    "SafetensorsHeader",
    "TensorEntry",
    "decode_header",
    "dtype_code",
    "encode_header",
    "header_length",
]

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
"""Most bytes of a header, as in the reference reader."""

_ALIGNMENT: Final = 8
_POINTER_START: Final = b"version "
_METADATA_KEY: Final = "__metadata__"
_ENTRY_KEYS: Final = {"dtype", "shape", "data_offsets"}
_MAX_NUMBER: Final = 2**63 - 1
_MAX_AXES: Final = 64

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    code: np.dtype(dtype)
    for code, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "I16": np.int16,
        "U16": np.uint16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "I32": np.int32,
        "U32": np.uint32,
        "F32": np.float32,
        "C64": np.complex64,
        "F64": np.float64,
        "I64": np.int64,
        "U64": np.uint64,
    }.items()
}
"""Supported dtypes, by their name in the header."""

_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
_PACKED_BITS: Final = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of dtypes whose elements share bytes: headers may have them, but no array is read."""


@dataclass(frozen=True)
class TensorEntry:
    """Tensor of a file.

    Attributes:
        name: name of the tensor.
        code: name of its dtype in the header, such as "BF16".
        shape: shape of the tensor.
        start: offset of its first byte in the file.
        end: offset just after its last byte.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes in the file."""
        return self.end - self.start

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype.

        Raises:
            UnsupportedFormatError: NumPy has no such dtype (elements share bytes), or the tensor
                has more axes than NumPy allows.
        """
        if len(self.shape) > _MAX_AXES:
            raise UnsupportedFormatError(
                "too many axes",
                path=self.name,
                expected=f"at most {_MAX_AXES}, as NumPy has",
                found=f"{len(self.shape)}",
                next_step="Write the tensor again with fewer axes; others of the file can be read.",
            )
        if self.code not in DTYPES:
            raise UnsupportedFormatError(
                "no NumPy dtype",
                path=self.name,
                expected=f"one of {', '.join(DTYPES)}",
                found=self.code,
                next_step="Read its bytes by range, or convert the file to a wider dtype.",
            )
        return DTYPES[self.code]


@dataclass(frozen=True)
class SafetensorsHeader:
    """Decoded header of a file.

    Attributes:
        metadata: free texts by name.
        tensors: the tensors by name, in the order of their data.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]


def dtype_code(dtype: np.dtype[Any], *, path: object) -> str:
    """Return the name of `dtype` in a header.

    Raises:
        UnsupportedLeafError: safetensors has no such dtype.
    """
    code = _CODES.get(dtype)
    if code is None:
        raise UnsupportedLeafError(
            "no such dtype in safetensors",
            path=path,
            expected=f"one of {', '.join(str(supported) for supported in _CODES)}",
            found=str(dtype),
            next_step="Export with a dtype of these, or leave the leaf out.",
        )
    return code


def encode_header(
    tensors: Sequence[tuple[str, np.dtype[Any], Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the encoded length and header of a file with these (name, dtype, shape), in order.

    Raises:
        UnsupportedLeafError: a dtype is not in safetensors, or the header exceeds its limit.
    """
    header: dict[str, Any] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": dtype_code(dtype, path=name),
            "shape": [int(size) for size in shape],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedLeafError(
            "header too large",
            path=f"{len(tensors)} tensors",
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            found=f"{len(text)} bytes",
            next_step="Use a smaller max_shard_size.",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_length(prefix: bytes, file_size: int, *, path: object) -> int:
    """Return the length of the header in bytes, from the first 8 bytes of a file.

    Raises:
        CorruptionError: the file can't hold such a header.
    """
    if len(prefix) < LENGTH_BYTES:
        raise _damaged(path, "a file of at least 8 bytes", f"{len(prefix)} bytes")
    if prefix[:LENGTH_BYTES] == _POINTER_START:
        raise _damaged(path, "the file", "a pointer of Git LFS to it: run git lfs pull")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    room = min(MAX_HEADER_BYTES, file_size - LENGTH_BYTES)
    if length > room:
        raise _damaged(path, f"a header of at most {room} bytes", f"{length} bytes")
    return length


def decode_header(data: bytes, file_size: int, *, path: object) -> SafetensorsHeader:
    """Return the decoded header, after a check of all of it.

    Args:
        data: the header's bytes, without the length.
        file_size: bytes of the whole file.
        path: the file, for errors.

    Raises:
        CorruptionError: the header is not JSON, a name occurs twice, or the tensors don't fill the
            data exactly.
        UnsupportedFormatError: a dtype is not one of the format's.
    """
    body = _parse(data, path)
    metadata = body.pop(_METADATA_KEY, None)
    if metadata is None:  # some writers write null for no metadata
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, f"{_METADATA_KEY} with texts only", repr(metadata)[:100])
    try:
        for text in [*metadata, *metadata.values(), *body]:
            text.encode()
    except UnicodeEncodeError as exc:  # JSON can escape a lone surrogate
        raise _damaged(path, "names and texts in Unicode", ascii(exc.object)[:200]) from exc
    base = LENGTH_BYTES + len(data)
    tensors = [_entry(name, fields, base, path) for name, fields in body.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = base
    for tensor in tensors:
        if tensor.start != position:
            kind = "an overlap" if tensor.start < position else "a gap"
            raise _damaged(
                path,
                f"{tensor.name!r} to start at byte {position - base} of the data",
                f"{kind}: it starts at byte {tensor.start - base}",
            )
        position = tensor.end
    if position != file_size:
        raise _damaged(path, f"{position} bytes as the header says", f"{file_size} bytes")
    return SafetensorsHeader(metadata, {tensor.name: tensor for tensor in tensors})


def _parse(data: bytes, path: object) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        body = dict(pairs)
        if len(body) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = counts.most_common(1)[0][0]
            raise _damaged(path, "every name once", f"{twice[:200]!r} twice")
        return body

    if not data.startswith(b"{"):
        raise _damaged(path, "a header that starts with '{'", repr(data[:16]))
    try:
        body = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as exc:
        raise _damaged(path, "a header in JSON", str(exc)[:200]) from exc
    if not isinstance(body, dict):
        raise _damaged(path, "a JSON object", type(body).__name__)
    return body


def _entry(name: str, fields: Any, base: int, path: object) -> TensorEntry:
    if not isinstance(fields, dict) or not fields.keys() >= _ENTRY_KEYS:
        raise _damaged(path, f"{name!r} with {sorted(_ENTRY_KEYS)}", repr(fields)[:200])
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    is_known = isinstance(code, str) and (code in DTYPES or code in _PACKED_BITS)
    if not is_known:
        raise UnsupportedFormatError(
            "unknown dtype",
            path=f"{path}: {name}",
            expected=f"one of {', '.join((*DTYPES, *_PACKED_BITS))}",
            found=repr(code)[:100],
            next_step="Upgrade Cairn if the format has gained a dtype; else get the file anew.",
        )
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        found = f"shape {shape!r}"[:100] + f", data_offsets {offsets!r}"[:100]
        raise _damaged(path, f"{name!r} with sizes and two offsets that are natural numbers", found)
    bits = room = _PACKED_BITS.get(code) or DTYPES[code].itemsize * 8
    for size in shape:
        bits = min(bits * size, _MAX_NUMBER + 1)
        room = min(room * max(size, 1), _MAX_NUMBER + 1)  # even an empty array can't have such axes
    start, end = offsets
    if room > _MAX_NUMBER or bits % 8 or end - start != bits // 8:
        expected = f"{name!r} to be {bits / 8:g} bytes, {code}{shape}"[:200]
        raise _damaged(path, expected, f"data_offsets {offsets}")
    return TensorEntry(name, code, tuple(shape), base + start, base + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number <= _MAX_NUMBER for number in value
    )


def _damaged(path: object, expected: str, found: str) -> CorruptionError:
    return CorruptionError(
        "not a valid safetensors file",
        path=path,
        expected=expected,
        found=found,
        next_step="Get or export the file again.",
    )
