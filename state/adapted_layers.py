"""Layers whose kernel may be quantized, and which may have adapters beside it.

An adapted layer is the layer itself with another class: the same attributes, the same call, and it
is still an instance of its own class. Qwix multiplies; see docs/adr/0006-quantization-methods.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cairn.state.lora import kernel_delta, make_adapters, output_delta
from cairn.state.mesh import sharding_of
from cairn.state.products import Product, contracted_axes, product_of
from cairn.state.quantization import METHODS, Method, QuantizationSettings
from cairn.state.quantized_weight import QuantizedWeight, dequantize, qwix_numerics

__all__ = [
    "LAYER_TYPES",
    "add_adapters",
    "can_be_adapted",
    "has_adapters",
    "merge_adapters",
    "pack_kernel",
    "plain_layer_class",
    "remove_adapters",
    "unpack_kernel",
]

LAYER_TYPES: tuple[type[Any], ...] = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
"""Flax's layers that multiply by a kernel; others are never adapted."""


def can_be_adapted(layer: Any) -> bool:
    """Says whether a layer is one of `LAYER_TYPES` that multiplies just as Flax does it."""
    if plain_layer_class(type(layer)) is not type(layer):
        return True
    known = next((kind for kind in LAYER_TYPES if isinstance(layer, kind)), None)
    return (
        known is not None
        and type(layer).__call__ is known.__call__
        and getattr(layer, "dot_general", None) in (None, jax.lax.dot_general)
        and getattr(layer, "dot_general_cls", None) is None
        and getattr(layer, "einsum_op", None) in (None, jnp.einsum)
        and type(layer.kernel) is nnx.Param
        and product_of(layer) is not None
    )


def plain_layer_class(layer_class: type[Any]) -> type[Any]:
    """Returns the class that an adapted layer's class was made from; any other class as it is."""
    plain: type[Any] = getattr(layer_class, "_plain_class", layer_class)
    return plain


def pack_kernel(layer: Any, settings: QuantizationSettings) -> None:
    """Quantizes a layer's kernel in place."""
    layer.kernel = QuantizedWeight.pack(layer.kernel, contracted_axes(layer), settings)
    _adapt(layer)


def unpack_kernel(layer: Any) -> None:
    """Makes a layer's quantized kernel a floating one again, in place."""
    layer.kernel = layer.kernel.unpack()
    _settle(layer)


def has_adapters(layer: Any) -> bool:
    """Says whether a layer has low-rank adapters."""
    return hasattr(layer, "kernel_lora_a")


def add_adapters(layer: Any, rank: int, scale: float, key: Any) -> None:
    """Gives a layer a new pair of adapters, which add nothing yet."""
    product = product_of(layer)
    assert product is not None
    layer.kernel_lora_a, layer.kernel_lora_b = make_adapters(layer.kernel, product, rank, key)
    layer.kernel_lora_scale = scale
    _adapt(layer)


def merge_adapters(layer: Any) -> None:
    """Adds to a layer's floating kernel what its adapters do, and sets B to zero."""
    product = product_of(layer)
    assert product is not None
    a, b, kernel = layer.kernel_lora_a, layer.kernel_lora_b, layer.kernel

    arrays = kernel.get_value(), a.get_value(), b.get_value()
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        return
    # Arrays under trace are nowhere, and those that were gathered are in host memory.
    kernel_place, b_place = sharding_of(arrays[0]), sharding_of(arrays[2])
    places = None if kernel_place is None or b_place is None else (kernel_place, b_place)
    merged = _merged_kernel(product, layer.kernel_lora_scale)
    weight, zeros = jax.jit(merged, out_shardings=places)(*arrays)
    if places is not None:
        jax.block_until_ready(weight)  # see QuantizedWeight.pack
    kernel.set_value(weight)
    b.set_value(zeros)


@functools.lru_cache(maxsize=1024)
def _merged_kernel(product: Product, scale: float) -> Any:
    """The function that merges adapters into a kernel; the same object each time, for jit."""

    def merged(weight: Any, a: Any, b: Any) -> Any:
        delta = kernel_delta(a, b, product, scale)
        return (weight.astype(jnp.float32) + delta).astype(weight.dtype), jnp.zeros_like(b)

    return merged


def remove_adapters(layer: Any) -> None:
    """Takes a layer's adapters away, in place."""
    for name in ("kernel_lora_a", "kernel_lora_b", "kernel_lora_scale"):
        delattr(layer, name)
    _settle(layer)


def _settle(layer: Any) -> None:
    """Gives a layer its own class back once nothing is adapted in it."""
    if not has_adapters(layer) and not isinstance(layer.kernel, QuantizedWeight):
        _change_class(layer, plain_layer_class(type(layer)))


def _adapt(layer: Any) -> None:
    plain: Any = plain_layer_class(type(layer))
    _change_class(layer, _adapted_class(plain))


def _change_class(layer: Any, layer_class: type[Any]) -> None:
    # Past Flax's own __setattr__, which would list "__class__" among the layer's attributes.
    object.__setattr__(layer, "__class__", layer_class)


@functools.cache
def _adapted_class(plain: Any) -> type[Any]:
    """The one adapted class of a layer class, so that equal models have equal graphdefs.

    It has no other base than the layer's class: only then can an instance change to it.
    """
    names = {
        "__call__": _call,
        "__doc__": plain.__doc__,
        "__module__": __name__,
        "_plain_class": plain,
    }
    adapted: type[Any] = type(plain)(f"Adapted{plain.__name__}", (plain,), names)
    return adapted


def _call(layer: Any, inputs: jax.Array, *arguments: Any, **keywords: Any) -> jax.Array:
    """The layer's outputs for its inputs, as the plain layer takes them."""
    product = product_of(layer, inputs.ndim)
    assert product is not None
    out: jax.Array
    if isinstance(layer.kernel, QuantizedWeight):
        out = _quantized_outputs(layer, inputs, product)
    else:
        out = layer._plain_class.__call__(layer, inputs, *arguments, **keywords)
    if not has_adapters(layer):
        return out
    a, b = layer.kernel_lora_a[...], layer.kernel_lora_b[...]
    scale = layer.kernel_lora_scale
    return out + output_delta(inputs.astype(out.dtype), a, b, product, scale, layer.precision)


def _quantized_outputs(layer: Any, inputs: jax.Array, product: Product) -> jax.Array:
    array = layer.kernel.arrays()
    bias = None if layer.bias is None else layer.bias[...]
    inputs, scale, bias = layer.promote_dtype((inputs, array.scale, bias), dtype=layer.dtype)
    method = METHODS[layer.kernel.method]
    if method.activation is None:
        kernel = dequantize(array).astype(scale.dtype)
        out = jnp.einsum(product.equation, inputs, kernel, precision=layer.precision)
    else:
        array = dataclasses.replace(array, scale=scale)
        out = _low_precision(product, method, layer.precision, inputs, array)
    if bias is None:
        return out
    sizes = dict(zip(product.kernel, layer.kernel.shape, strict=True))
    shape = tuple(sizes.get(letter, 1) for letter in product.outputs)
    return out + jnp.broadcast_to(jnp.reshape(bias, shape), out.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _low_precision(
    product: Product, method: Method, precision: Any, inputs: jax.Array, array: Any
) -> jax.Array:
    """The product of rounded activations and a quantized weight.

    Its gradients are those of the product with the activations as they are (straight-through),
    since rounding has none.
    """
    import qwix

    with qwix_numerics():
        rounded = qwix.quantize(
            inputs,
            method.activation,
            calibration_method=method.calibration,
            **_activation_groups(product, method, array),
        )

        def in_few_bits(rounded: Any, array: Any) -> jax.Array:
            out: jax.Array = qwix.einsum(product.equation, rounded, array, precision=precision)
            return out

        def in_floats(rounded: Any, array: Any) -> jax.Array:
            operands = qwix.dequantize(rounded), qwix.dequantize(array)
            return jnp.einsum(product.equation, *operands, precision=precision)

        if method.activation != jnp.int4:
            return in_few_bits(rounded, array)
        # XLA multiplies int4 by int4 on TPUs only. Elsewhere the same numbers meet as floats.
        out: jax.Array = jax.lax.platform_dependent(
            rounded, array, tpu=in_few_bits, default=in_floats
        )
        return out


def _activation_groups(product: Product, method: Method, array: Any) -> dict[str, Any]:
    """Which dimensions of the inputs have scales of their own: all that are not summed over."""
    contracted = [product.inputs.index(letter) for letter in product.contracted]
    channels = tuple(axis for axis in range(len(product.inputs)) if axis not in contracted)
    if not method.grouped:
        return {"channelwise_axes": channels}
    last = product.contracted_axes[-1]
    length = array.qvalue.shape[last] // array.scale.shape[last]
    return {"channelwise_axes": channels, "tiled_axes": {contracted[-1]: length}}


def _forward(
    product: Product, method: Method, precision: Any, inputs: jax.Array, array: Any
) -> tuple[jax.Array, Any]:
    return _low_precision(product, method, precision, inputs, array), (inputs, array)


def _backward(
    product: Product, method: Method, precision: Any, kept: Any, cotangent: jax.Array
) -> tuple[jax.Array, Any]:
    inputs, array = kept

    def straight(inputs: jax.Array, array: Any) -> jax.Array:
        return jnp.einsum(product.equation, inputs, dequantize(array), precision=precision)

    _, transposed = jax.vjp(straight, inputs, array)
    gradients: tuple[jax.Array, Any] = transposed(cotangent)
    return gradients


_low_precision.defvjp(_forward, _backward)
