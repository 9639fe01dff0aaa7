"""Source that dequantizes published weights when they are read."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from cairn.interop.conversion.boxes import Box, whole_box
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.errors import ConfigError, ConversionError
from cairn.interop.weights.fp8 import FP8
from cairn.interop.weights.mxfp4 import MXFP4
from cairn.interop.weights.weight_source import QuantizedTensor, RowSource, WeightSource

__all__ = ["QUANTIZATION_KEY", "Dequantized", "QuantizationMethod", "quantization_method"]

QUANTIZATION_KEY: Final = "quantization_config"
"""The key of config.json that says how the weights are quantized."""

_METHODS: Final[Mapping[str, type[FP8 | MXFP4]]] = {"fp8": FP8, "mxfp4": MXFP4}


class QuantizationMethod(Protocol):
    """Quantization method whose weights can be dequantized."""

    def find(self, weights: WeightSource) -> tuple[list[QuantizedTensor], list[str]]:
        """Return the quantized tensors of a source, and a line for each problem with them."""
        ...


def quantization_method(data: Any, *, path: str) -> QuantizationMethod:
    """Return the method that a quantization_config names.

    Args:
        data: the value of `QUANTIZATION_KEY`.
        path: the file, for messages.

    Raises:
        ConfigError: the method is not supported, or has unknown options; these are named.
    """
    name = data.get("quant_method") if isinstance(data, Mapping) else None
    kind = _METHODS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(
            path=f"{path}: {QUANTIZATION_KEY}",
            expected=f"quant_method to be one of {', '.join(_METHODS)}",
            found=repr(data if name is None else name)[:200],
            next_step="take the model as it was before quantization, or dequantize it first, with "
            "the library that quantized it",
        )
    method, problems = kind.read(data)
    problems += [f"{key}={data[key]!r}" for key in data if key not in kind.KEYS]
    if problems:
        raise ConfigError(
            path=f"{path}: {QUANTIZATION_KEY}",
            expected=f"{name} as it is published, with the keys {', '.join(sorted(kind.KEYS))}",
            found="; ".join(problems),
            next_step="take the model as it was before quantization",
        )
    return method


class Dequantized:
    """Source with the names, shapes and dtypes of the model before quantization.

    A quantized tensor is dequantized in float32 when it is read, and then cast. Other tensors are
    read as they are stored.
    """

    def __init__(
        self, weights: RowSource, method: QuantizationMethod, dtype: np.dtype[Any], path: str
    ) -> None:
        """Find the quantized tensors by their names and shapes; no values are read.

        Args:
            weights: the stored tensors.
            method: method by which they are quantized.
            dtype: dtype of the dequantized tensors.
            path: where the weights are, for messages.

        Raises:
            ConversionError: scales are missing, too many or mis-shaped; all are listed.
        """
        tensors, problems = method.find(weights)
        if problems:
            raise ConversionError(
                path=path,
                expected="a scale for each quantized tensor, and no others",
                found=f"{len(problems)} problem(s)",
                next_step="take the files again from their source",
                problems=problems,
            )
        self._weights = weights
        self._dtype = dtype
        self._path = path
        self._quantized = {tensor.name: tensor for tensor in tensors}
        self._parts = {part for tensor in tensors for part in tensor.parts}

    @functools.cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        plain = {n: shape for n, shape in self._weights.shapes.items() if n not in self._parts}
        return plain | {name: tensor.shape for name, tensor in self._quantized.items()}

    @functools.cached_property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype of every tensor."""
        plain = {n: dtype for n, dtype in self._weights.dtypes.items() if n not in self._parts}
        return plain | dict.fromkeys(self._quantized, self._dtype)

    def read(self, name: str) -> Array:
        """Return a whole tensor, dequantized if it is stored quantized.

        Raises:
            ConversionError: its scales are not finite.
        """
        tensor = self._quantized.get(name)
        if tensor is None:
            return self._weights.read(name)
        out: Array = np.empty(tensor.shape, self._dtype)
        try:
            tensor.fill(self._weights, out)
        except FloatingPointError as exc:
            raise ConversionError(
                path=f"{self._path}: {name}",
                expected="scales that are numbers",
                found=str(exc),
                next_step="take the files again from their source",
            ) from exc
        return out

    def rows(self, name: str, low: int, high: int) -> Array:
        """Return the rows of a tensor from `low` up to, not including, `high`."""
        if name in self._quantized:
            return self.read(name)[low:high]
        return self._weights.rows(name, low, high)

    def cover(self, name: str, box: Box) -> Box:
        """Return the box that is read for `box`: all of a tensor if it is quantized."""
        if name in self._quantized:
            return whole_box(self._quantized[name].shape)
        return self._weights.cover(name, box)

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Array]:
        """Return boxes of a tensor; a quantized one is dequantized whole, and only once."""
        if name in self._quantized:
            values = self.read(name)
            return [values[box] for box in boxes]
        return self._weights.boxes(name, boxes)
