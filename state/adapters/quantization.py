"""Methods and settings of quantization; Qwix does the arithmetic.

| method | weight | activations | how activations are quantized, while the model runs |
|---|---|---|---|
| `nf4` | NormalFloat 4 | as they are | |
| `8bit` | int8 | as they are | |
| `a8bit` | int8 | int8 | to the range they have (minimum to maximum), per token and group |
| `a8q` | int8 | int8 | symmetric, one scale per token |
| `a4q` | int4 | int4 | symmetric, per token and group |
| `aqt` | float8 (e4m3) | float8 (e4m3) | symmetric, per token and group |

Weight quantization is symmetric, with one scale per group of `group_size` inputs and output
channel. The reasons are in docs/adr/0006-quantization-methods.md.

Source: arXiv 2305.14314 (NormalFloat 4), https://github.com/google/qwix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp

from cairn.interop.errors import ArgumentError
from cairn.interop.names import EasyDeLQuantizationMethods

__all__ = [
    "METHODS",
    "Method",
    "QuantizationSettings",
    "group_length",
]

PER_CHANNEL = -1
"""The `group_size` that takes all inputs of an output channel as one group."""


@dataclass(frozen=True)
class Method:
    """Formats of weights and activations under one quantization method.

    Attributes:
        weight: Qwix's type of the stored weight: "nf4", or a JAX dtype.
        activation: dtype that activations are rounded to, None to leave them.
        calibration: Qwix's calibration of the activations, "absmax" or "minmax".
        grouped: whether activations have a scale per token and group; if not, one per token.
    """

    weight: Any
    activation: Any = None
    calibration: str = "absmax"
    grouped: bool = False


METHODS: Mapping[EasyDeLQuantizationMethods, Method] = {
    EasyDeLQuantizationMethods.NF4: Method("nf4"),
    EasyDeLQuantizationMethods.INT8: Method(jnp.int8),
    EasyDeLQuantizationMethods.A8BIT: Method(jnp.int8, jnp.int8, "minmax", grouped=True),
    EasyDeLQuantizationMethods.A8Q: Method(jnp.int8, jnp.int8),
    EasyDeLQuantizationMethods.A4Q: Method(jnp.int4, jnp.int4, grouped=True),
    EasyDeLQuantizationMethods.AQT: Method(jnp.float8_e4m3fn, jnp.float8_e4m3fn, grouped=True),
}
"""Formats of each method; no two methods are the same."""


@dataclass(frozen=True)
class QuantizationSettings:
    """Settings of a model's quantization; hashable, and JSON both ways.

    Attributes:
        method: one of `EasyDeLQuantizationMethods`.
        group_size: inputs that share a scale, -1 for all of them; a layer with fewer inputs is
            one group.
        pattern: regular expression, searched in the "/"-joined path of each layer.

    Raises:
        ArgumentError: a method that is unknown, a size below 1 other than -1, a pattern that is
            no regular expression.
    """

    method: EasyDeLQuantizationMethods
    group_size: int = 64
    pattern: str = ".*"

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", EasyDeLQuantizationMethods(self.method))
        size: Any = self.group_size
        if (
            not isinstance(size, int)
            or isinstance(size, bool)
            or (size < 1 and size != PER_CHANNEL)
        ):
            raise ArgumentError(
                path="group_size", expected="1 or more, or -1 for one group", found=repr(size)
            )
        check_pattern("quantization_pattern", self.pattern)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        return {
            "method": str(self.method),
            "group_size": self.group_size,
            "pattern": self.pattern,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the settings from the result of `to_dict`.

        Raises:
            ArgumentError: if something is missing, unknown or wrong.
        """
        settings: Self = settings_from_dict(cls, data)
        return settings


def settings_from_dict(settings_class: Any, data: Mapping[str, Any]) -> Any:
    """Return a settings dataclass made of a mapping with exactly its fields.

    Raises:
        ArgumentError: if something is missing, unknown or wrong.
    """
    try:
        return settings_class(**data)
    except TypeError as error:
        raise ArgumentError(
            path=settings_class.__name__,
            expected=", ".join(settings_class.__dataclass_fields__),
            found=repr(data),
        ) from error


def check_pattern(argument: str, pattern: Any) -> None:
    """Check that an argument is a regular expression.

    Raises:
        ArgumentError: if it is not.
    """
    try:
        re.compile(pattern)
    except (TypeError, re.error) as error:
        raise ArgumentError(
            path=argument, expected="a regular expression", found=f"{pattern!r}: {error}"
        ) from error


def group_length(inputs: int, group_size: int) -> int:
    """Return how many of a layer's inputs share a scale; `group_size` is that of the settings."""
    return inputs if group_size == PER_CHANNEL else min(group_size, inputs)
