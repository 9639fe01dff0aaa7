"""Low-rank adapters: their settings, and the arithmetic of one layer's pair.

A layer with weight W and adapters A, B computes `x W + (alpha / rank) (x A) B`. Only A and B are
trained. A starts random and B at zero, so a new adapter changes nothing. Their dtype may be wider
than W's, so that small optimizer steps are not rounded away; the layer still computes in its own
dtype.

Source: arXiv 2106.09685.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding

from cairn.interop.dtypes import floating_dtype
from cairn.interop.errors import ArgumentError
from cairn.state.adapters.products import Product
from cairn.state.adapters.quantization import check_pattern, settings_from_dict
from cairn.state.adapters.quantized_weight import axes_of
from cairn.state.sharding.mesh import sharding_of
from cairn.state.sharding.specs import short_spec

__all__ = ["LoraSettings", "kernel_delta", "make_adapters", "output_delta"]


@dataclass(frozen=True)
class LoraSettings:
    """Settings of adapters: layers, rank, scale and dtype; hashable, and JSON both ways.

    Attributes:
        rank: columns of A and rows of B, 1 or more.
        alpha: the adapters' output is scaled by alpha / rank.
        pattern: regular expression, searched in the "/"-joined path of each layer.
        dtype: name of the adapters' floating dtype; None for that of the weight beside them.

    Raises:
        ArgumentError: a rank below 1, an alpha that is no positive number, a pattern that is no
            regular expression, or a dtype that is not floating.
    """

    rank: int
    alpha: float
    pattern: str
    dtype: str | None = None

    def __post_init__(self) -> None:
        rank: Any = self.rank
        alpha: Any = self.alpha
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ArgumentError(
                path="lora_rank", expected="an integer, 1 or more", found=repr(rank)
            )
        if (
            not isinstance(alpha, int | float)
            or isinstance(alpha, bool)
            or not (0 < alpha < math.inf)
        ):
            raise ArgumentError(
                path="lora_alpha", expected="a finite number above 0", found=repr(alpha)
            )
        object.__setattr__(self, "alpha", float(alpha))
        check_pattern("lora_pattern", self.pattern)
        if self.dtype is not None:
            name = floating_dtype(self.dtype, argument="lora_dtype").name
            object.__setattr__(self, "dtype", name)

    @property
    def scale(self) -> float:
        """Factor on the adapters' output: alpha / rank."""
        return self.alpha / self.rank

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the settings from the result of `to_dict`.

        Raises:
            ArgumentError: if something is missing, unknown or wrong.
        """
        settings: Self = settings_from_dict(cls, data)
        return settings


def make_adapters(
    weight: Any, product: Product, settings: LoraSettings, key: Any
) -> tuple[nnx.LoRAParam[Any], nnx.LoRAParam[Any]]:
    """Return a new pair (A, B) for a weight, sharded as the weight is.

    A is uniform with variance 2 / inputs (He), B is zero. An abstract weight gives abstract
    adapters.

    Args:
        weight: the layer's kernel, an `nnx.Param` or a `QuantizedWeight`.
        product: the layer's einsum.
        settings: rank and dtype.
        key: a JAX key for A.
    """
    sizes = dict(zip(product.kernel, weight.shape, strict=True))
    shapes = [
        tuple(sizes.get(letter, settings.rank) for letter in letters)
        for letters in product.adapters
    ]
    inputs = math.prod(sizes[letter] for letter in product.contracted)
    value = weight.array.qvalue.get_value() if hasattr(weight, "array") else weight.get_value()
    places = _places(value, product)
    names = weight.axes if hasattr(weight, "array") else axes_of(weight)
    by_letter = dict(zip(product.kernel, names, strict=True)) if names is not None else None

    dtype = np.dtype(weight.dtype)
    if settings.dtype is not None:
        dtype = floating_dtype(settings.dtype, argument="lora_dtype")
    initial = _starting_pair(shapes[0], shapes[1], dtype, inputs)
    words = jax.random.key_data(key)
    arrays: tuple[Any, Any]
    if isinstance(value, jax.ShapeDtypeStruct):
        arrays = jax.eval_shape(initial, words)
    elif places is None or isinstance(words, jax.core.Tracer):
        arrays = jax.jit(initial)(words)
    else:
        # A key in NumPy form counts as the same input on every process.
        arrays = jax.jit(initial, out_shardings=places)(np.asarray(words))
    pair = []
    for array, letters in zip(arrays, product.adapters, strict=True):
        axes = None if by_letter is None else tuple(by_letter.get(letter) for letter in letters)
        pair.append(nnx.LoRAParam(array) if axes is None else nnx.LoRAParam(array, axes=axes))
    return pair[0], pair[1]


@functools.lru_cache(maxsize=1024)
def _starting_pair(a: tuple[int, ...], b: tuple[int, ...], dtype: Any, inputs: int) -> Any:
    """Return a function from key data to new adapters A and B; cached, so that jit can reuse it.

    Args:
        a: shape of A.
        b: shape of B.
        dtype: dtype of both.
        inputs: number of inputs of the layer, which sets A's variance.
    """
    bound = math.sqrt(6.0 / inputs)

    def initial(words: Any) -> tuple[jax.Array, jax.Array]:
        drawn = jax.random.uniform(jax.random.wrap_key_data(words), a, jnp.float32, -bound, bound)
        return drawn.astype(dtype), jnp.zeros(b, dtype)

    return initial


def output_delta(
    inputs: jax.Array, a: jax.Array, b: jax.Array, product: Product, scale: float, precision: Any
) -> jax.Array:
    """Return the adapters' contribution to a layer's output, in the dtype of its inputs."""
    first, second = product.through_adapters
    narrow = jnp.einsum(first, inputs, a.astype(inputs.dtype), precision=precision)
    wide = jnp.einsum(second, narrow, b.astype(inputs.dtype), precision=precision)
    return wide * jnp.asarray(scale, wide.dtype)


def kernel_delta(a: jax.Array, b: jax.Array, product: Product, scale: float) -> jax.Array:
    """Return the change of the kernel that has the same effect as the adapters, in float32."""
    wide = jnp.einsum(
        product.adapters_to_kernel,
        a.astype(jnp.float32),
        b.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    delta: jax.Array = wide * jnp.float32(scale)
    return delta


def _places(value: Any, product: Product) -> tuple[Sharding, Sharding] | None:
    """Return the shardings of A and B, which follow that of the weight.

    None if the weight has no sharding, or lies on a device without being committed to it.
    """
    place = sharding_of(value)
    if not isinstance(place, NamedSharding):
        bound = isinstance(place, Sharding) and getattr(value, "committed", False)
        return (place, place) if bound else None
    entries = [*place.spec, *[None] * (len(product.kernel) - len(place.spec))]
    by_letter = dict(zip(product.kernel, entries, strict=True))
    a, b = (
        NamedSharding(place.mesh, short_spec(by_letter.get(letter) for letter in letters))
        for letters in product.adapters
    )
    return a, b
