"""MXFP4: 4-bit weights in groups that share an exponent, the form in which gpt-oss is published.

A weight `X` [experts, in, out] is stored as `X_blocks` [experts, out, in/32, 16] and `X_scales`
[experts, out, in/32], both of bytes. A byte of a block holds the weights of two inputs, the first
in its low half; a scale is the exponent that 32 inputs share, plus 127.

Source: OCP Microscaling Formats (MX) 1.0: 5.3.3 (E2M1), 5.4.1 (E8M0); transformers `Mxfp4Config`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cairn.interop.conversion.ops import Array
from cairn.interop.weights.weight_source import QuantizedTensor, WeightSource

__all__ = ["MXFP4"]

_BLOCKS: Final = "_blocks"
_SCALES: Final = "_scales"
_BYTES: Final = 16
"""Bytes of a block."""
_OUTPUTS: Final = 64
"""Number of outputs that are dequantized at a time, so that they fit the processor's cache."""
_BIAS: Final = 127
_NAN: Final = 255
_HALF: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FOUR_BITS: Final = np.concatenate([_HALF, -_HALF])
_PAIRS: Final = np.stack(
    [_FOUR_BITS[np.arange(256) % 16], _FOUR_BITS[np.arange(256) // 16]], axis=-1
).view(np.complex64)[:, 0]
"""Byte -> its two float32 numbers, as one complex64, which NumPy looks up much faster."""
_POWERS: Final = np.append(
    np.ldexp(np.float32(1), np.arange(_NAN) - _BIAS), np.float32(np.nan)
).astype(np.float32)


@dataclass(frozen=True)
class MXFP4:
    """Quantization method "mxfp4"; it has no settings."""

    KEYS = frozenset({"dequantize", "modules_to_not_convert", "quant_method"})

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> tuple[MXFP4, list[str]]:
        """Return the method, and no lines, since no setting is unsupported."""
        return cls(), []

    def find(self, weights: WeightSource) -> tuple[list[QuantizedTensor], list[str]]:
        """Return the quantized tensors of a source, and a line for each problem with them."""
        shapes, dtypes = weights.shapes, weights.dtypes
        tensors, problems = [], []
        endings = (_BLOCKS, _SCALES)
        bases = (n.removesuffix(end) for n in shapes for end in endings if n.endswith(end))
        for base in dict.fromkeys(bases):
            blocks, scales = (f"{base}{ending}" for ending in endings)
            wrong = [f"{name}: missing" for name in (blocks, scales) if name not in shapes]
            wrong += [
                f"{name}: expected uint8, found {dtypes[name]}"
                for name in (blocks, scales)
                if name in shapes and dtypes[name] != np.uint8
            ]
            if base in shapes:
                wrong.append(f"{base}: there in four bits, and as it is too")
            shape = shapes.get(blocks)
            if shape is not None and (len(shape) != 4 or shape[-1] != _BYTES):
                wrong.append(
                    f"{blocks}: expected [experts, out, in/32, {_BYTES}], found {list(shape)}"
                )
            elif shape is not None and scales in shapes and shapes[scales] != shape[:-1]:
                wrong.append(f"{scales}: expected {list(shape[:-1])}, found {list(shapes[scales])}")
            if shape is None or wrong:
                problems += wrong
                continue
            experts, outputs, groups, _ = shape
            plain = (experts, groups * 2 * _BYTES, outputs)
            fill = functools.partial(_fill, blocks, scales)
            tensors.append(QuantizedTensor(base, (blocks, scales), plain, fill))
        return tensors, problems


def _fill(blocks: str, scales: str, source: WeightSource, out: Array) -> None:
    exponents = source.read(scales)
    if (exponents == _NAN).any():
        raise FloatingPointError(f"NaN ({_NAN}) in {scales}")
    for part, powers, codes in zip(out, _POWERS[exponents], source.read(blocks), strict=True):
        for low in range(0, len(codes), _OUTPUTS):
            high = min(low + _OUTPUTS, len(codes))
            values = _PAIRS[codes[low:high]].view(np.float32)
            values = values.reshape(*powers[low:high].shape, 2 * _BYTES)
            with np.errstate(over="ignore"):  # overflow is infinity
                scaled = values * powers[low:high, :, None]
            part[:, low:high] = scaled.reshape(high - low, -1).T
