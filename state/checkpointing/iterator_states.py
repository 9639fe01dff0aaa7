"""Lossless JSON encoding of an iterator's state.

JSON types are written unchanged, so a Grain iterator's file is what Grain itself would write. Other
types become an object with one key that begins with "$": bytes, tuples, non-finite floats, mappings
with keys other than text, NumPy arrays, and PyTorch tensors (samplers keep their random state in
them). All else is refused: nothing is pickled.
"""

import base64
import json
import math
import reprlib
import sys
from collections import OrderedDict
from typing import Any, Final

import numpy as np

from cairn.storage.errors import CorruptionError, UnsupportedFormatError
from cairn.storage.store.uri import is_text

__all__ = ["NotStorableError", "state_from_json", "state_to_json"]

_BYTES: Final = "$bytes"
_TUPLE: Final = "$tuple"
_FLOAT: Final = "$float"
_DICT: Final = "$dict"
_ARRAY: Final = "$array"
_TENSOR: Final = "$tensor"

_NUMBERS: Final = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
"""Supported kinds of NumPy dtypes -> maximum bytes of an element. Wider floats have other formats
on other processors."""

_REGISTERED: Final = 2
"""`isbuiltin` of a dtype that another package registered; its `str` does not identify it."""

_MAX_BITS: Final = 8192
"""Maximum bits of an integer: JSON readers may refuse more than some 4,000 digits."""


_MAX_DEPTH: Final = 100
"""Maximum nesting depth: deeper JSON may be unreadable, depending on the reader's stack."""


class NotStorableError(Exception):
    """Parts of an iterator's state can't be stored.

    Attributes:
        problems: one line per part: its place in the state, and its type.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def state_to_json(state: Any) -> bytes:
    """Encode an iterator's state as JSON; NumPy numbers become equal Python numbers.

    Raises:
        NotStorableError: parts of the state are of unsupported types; all are listed.
    """
    problems: list[str] = []
    try:
        written = _written(state, "state", problems)
        if not problems:
            return json.dumps(written, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        problems = [f"state: more than {_MAX_DEPTH} containers deep, or within itself"]
    raise NotStorableError(problems)


def state_from_json(data: bytes, *, path: object) -> Any:
    """Decode an iterator's state from the result of `state_to_json`.

    Args:
        data: the JSON.
        path: the file, for errors.

    Raises:
        UnsupportedFormatError: a newer release wrote the state, or it holds tensors and PyTorch is
            not imported.
        CorruptionError: `data` is not JSON of this form.
    """
    try:
        return json.loads(data, object_hook=lambda node: _read(node, path))
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        if isinstance(exc, UnsupportedFormatError):
            raise
        raise CorruptionError(
            "the state of an iterator can't be read",
            path=path,
            expected="what was saved",
            found=f"{data[:64]!r} ({exc})",
            next_step="Load another step.",
        ) from exc


def _written(value: Any, where: str, problems: list[str], depth: int = 0) -> Any:
    """Return the JSON form of `value`; add a line to `problems` for each unsupported part.

    Args:
        value: a state, or a part of one.
        where: place of `value` in the state, for `problems`.
        problems: list that lines are added to.
        depth: number of containers around `value`.
    """
    if depth > _MAX_DEPTH:
        raise RecursionError
    kind = type(value)
    if isinstance(value, np.bool_ | np.integer) or (
        isinstance(value, np.floating) and value.itemsize <= np.dtype(float).itemsize
    ):
        return _written(value.item(), where, problems)
    if value is None or kind is bool or (kind is str and is_text(value)):
        return value
    if kind is int and value.bit_length() <= _MAX_BITS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if kind is bytes:
        return {_BYTES: _text(value)}
    if kind is list or kind is tuple:
        parts = [
            _written(element, f"{where}[{n}]", problems, depth + 1)
            for n, element in enumerate(value)
        ]
        return parts if kind is list else {_TUPLE: parts}
    if kind is dict or kind is OrderedDict:
        return _written_dict(value, where, problems, depth + 1)
    if (
        kind is np.ndarray
        and value.dtype.isbuiltin != _REGISTERED
        and value.dtype.itemsize <= _NUMBERS.get(value.dtype.kind, -1)
    ):
        return {_ARRAY: _described(value)}
    tensor = _as_numpy(value)
    if tensor is not None:
        return {_TENSOR: _described(tensor)}
    problems.append(f"{where}: {kind.__module__}.{kind.__qualname__} {reprlib.repr(value)}")
    return None


def _written_dict(value: dict[Any, Any], where: str, problems: list[str], depth: int) -> Any:
    parts = {
        key: _written(member, f"{where}[{key!r}]", problems, depth) for key, member in value.items()
    }
    if all(type(key) is str and is_text(key) and not key.startswith("$") for key in parts):
        return parts
    keys = [_written(key, f"{where}: its key", problems, depth) for key in parts]
    return {_DICT: [list(pair) for pair in zip(keys, parts.values(), strict=True)]}


def _described(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    dtype, shape = array.dtype.str, list(array.shape)
    return {"dtype": dtype, "shape": shape, "data": _text(array.tobytes())}


def _as_numpy(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a plain PyTorch tensor in host memory as an array; None for any other value."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return None
    if value.device.type != "cpu" or value.requires_grad or value.layout is not torch.strided:
        return None
    try:
        array: np.ndarray[Any, Any] = value.numpy()
    except (TypeError, RuntimeError):  # no such NumPy dtype, or a conjugate or negative view
        return None
    return array


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _read(node: dict[str, Any], path: object) -> Any:
    """Decode one JSON object; the objects within it are decoded already."""
    if len(node) != 1 or not next(iter(node)).startswith("$"):
        return node
    ((tag, value),) = node.items()
    match tag:
        case "$bytes":
            return base64.b64decode(value, validate=True)
        case "$tuple":
            return tuple(value)
        case "$float":
            return float(value)
        case "$dict":
            return dict(value)
        case "$array":
            return _array(value)
        case "$tensor":
            return _imported_torch(path).from_numpy(_array(value))
        case _:
            raise UnsupportedFormatError(
                "an unknown part of an iterator's state",
                path=path,
                expected=", ".join((_BYTES, _TUPLE, _FLOAT, _DICT, _ARRAY, _TENSOR)),
                found=tag,
                next_step="Upgrade Cairn to the release that wrote it, or a later one.",
            )


def _array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"an array of {dtype}")
    data = base64.b64decode(value["data"], validate=True)
    return np.frombuffer(data, dtype).reshape(value["shape"]).copy()


def _imported_torch(path: object) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise UnsupportedFormatError(
            "the state of an iterator holds tensors",
            path=path,
            expected="PyTorch to be imported",
            found="that it is not",
            next_step="Import torch, or restore an iterator of the kind that was saved.",
        )
    return torch
