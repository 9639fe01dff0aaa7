"""FP8 weights with scales, the form in which DeepSeek V3 is published.

Beside a matrix `X` [out, in] in float8_e4m3fn, a file has `X_scale_inv`, a number for each block:
x[o, i] = X[o, i] * X_scale_inv[o // block, i // block]. Blocks at the edges are smaller.

Source: arXiv 2412.19437, 3.3; transformers `FineGrainedFP8Config`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.weights.weight_source import QuantizedTensor, WeightSource
from cairn.storage.arrays.dtypes import is_floating

__all__ = ["FP8"]

_SUFFIX: Final = "_scale_inv"
_ACTIVATIONS: Final = (".activation_scale", ".input_scale")
"""Endings of scales for 8-bit activations; they are dropped, as our models don't quantize these."""
_EIGHT_BITS: Final = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALES: Final = (
    np.dtype(np.float32),
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e8m0fnu),
)
_ROWS: Final = 512
"""Number of rows that are dequantized at a time."""


@dataclass(frozen=True)
class FP8:
    """Settings of a quantization_config of the method "fp8".

    Attributes:
        block: rows and columns that share a scale; None: one scale for each tensor, or each row.
        static: whether the files also have scales of activations, which are ignored.
    """

    block: tuple[int, int] | None
    static: bool

    KEYS = frozenset(
        {
            *("activation_scheme", "dequantize", "expert_dtype", "fmt", "ignored_layers"),
            *("modules_to_convert", "modules_to_not_convert", "quant_method", "scale_fmt"),
            "weight_block_size",
        }
    )

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> tuple[FP8, list[str]]:
        """Return the method of a quantization_config, and a line for each unsupported setting."""
        usual = {"activation_scheme": "dynamic", "fmt": "e4m3"}
        usual |= {"scale_fmt": "float", "expert_dtype": "fp8"}
        supported = {
            "activation_scheme": ("dynamic", "static"),
            "fmt": ("e4m3",),
            "scale_fmt": ("float", "ue8m0"),
            "expert_dtype": ("fp8",),
        }
        settings = {
            key: value if data.get(key) is None else data[key] for key, value in usual.items()
        }
        problems = [
            f"{key}={value!r}" for key, value in settings.items() if value not in supported[key]
        ]
        block = data.get("weight_block_size", (128, 128))
        plain = isinstance(block, list | tuple) and len(block) == 2
        if block is not None and not (plain and all(type(n) is int and n > 0 for n in block)):
            problems.append(f"weight_block_size={block!r}")
            block = None
        size = None if block is None else (block[0], block[1])
        return cls(size, settings["activation_scheme"] == "static"), problems

    def find(self, weights: WeightSource) -> tuple[list[QuantizedTensor], list[str]]:
        """Return the quantized tensors of a source, and a line for each problem with them."""
        shapes, dtypes = weights.shapes, weights.dtypes
        tensors, problems = [], []
        for name, dtype in dtypes.items():
            if name.endswith(_SUFFIX):
                base = name.removesuffix(_SUFFIX)
                if base not in dtypes:
                    problems.append(f"{name}: a scale of {base}, which is not there")
                elif dtypes[base] != _EIGHT_BITS:
                    problems.append(f"{name}: a scale of {base}, which is {dtypes[base]}")
                continue
            if dtype != _EIGHT_BITS:
                if dtype.itemsize == 1 and is_floating(dtype):
                    problems.append(f"{name}: expected {_EIGHT_BITS}, found {dtype}")
                continue
            scale = f"{name}{_SUFFIX}"
            scale_shapes = self._scale_shapes(shapes[name])
            expected = " or ".join(map(str, map(list, scale_shapes))) or "none, as it is no matrix"
            if scale not in dtypes:
                problems.append(f"{scale}: missing, expected {expected}")
            elif shapes[scale] not in scale_shapes:
                problems.append(f"{scale}: expected {expected}, found {list(shapes[scale])}")
            elif dtypes[scale] not in _SCALES:
                problems.append(f"{scale}: expected {_SCALES[0]}, found {dtypes[scale]}")
            else:
                parts = [name, scale]
                if self.static:
                    module = name.removesuffix(".weight")
                    besides = (f"{module}{ending}" for ending in _ACTIVATIONS)
                    parts += [activation for activation in besides if activation in dtypes]
                fill = functools.partial(_fill, name, scale, self.block)
                tensors.append(QuantizedTensor(name, tuple(parts), shapes[name], fill))
        return tensors, problems

    def _scale_shapes(self, shape: Shape) -> list[Shape]:
        if len(shape) < 2:
            return []
        *lead, rows, columns = shape
        if self.block is None:
            scalars: list[Shape] = [] if lead else [(), (1,)]
            return [*dict.fromkeys([*scalars, (*lead, 1, 1), (*lead, rows, 1)])]
        return [(*lead, -(-rows // self.block[0]), -(-columns // self.block[1]))]


def _fill(
    name: str, scale: str, block: tuple[int, int] | None, source: WeightSource, out: Array
) -> None:
    scales = source.read(scale).astype(np.float32)
    if not np.isfinite(scales).all():
        raise FloatingPointError(f"NaN or infinity in {scale}")
    values = source.read(name)
    *lead, rows, columns = values.shape
    if block is None:
        scales = np.broadcast_to(
            scales.reshape(scales.shape if scales.ndim >= 2 else (1, 1)), (*lead, rows, 1)
        )
        block = (1, columns)
    height, width = block
    for at in np.ndindex(*lead):
        codes, grid = values[at], scales[at]
        for low in range(0, rows, _ROWS):
            high = min(low + _ROWS, rows)
            lines = grid[np.arange(low, high) // height]
            factors = np.repeat(lines, width, axis=1)[:, :columns]
            out[at][low:high] = codes[low:high].astype(np.float32) * factors
