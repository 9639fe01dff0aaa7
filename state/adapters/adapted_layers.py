"""Layers whose kernel may be quantized, and which may have adapters beside it.

An adapted layer is a shallow copy of a layer: it shares the layer's Variables. Its class is a
subclass of the layer's class with another `__call__`. `replace` puts it into the model in place of
the layer. Qwix multiplies the quantized weights; see docs/adr/0006-quantization-methods.md.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from cairn.state.adapters.lora import LoraSettings, kernel_delta, make_adapters, output_delta
from cairn.state.adapters.products import Product, contracted_axes, product_of
from cairn.state.adapters.quantization import METHODS, Method, QuantizationSettings
from cairn.state.adapters.quantized_weight import QuantizedWeight, dequantize, qwix_numerics
from cairn.state.sharding.mesh import sharding_of

__all__ = [
    "LAYER_TYPES",
    "adapted",
    "add_adapters",
    "can_be_adapted",
    "has_adapters",
    "merge_adapters",
    "pack_kernel",
    "remove_adapters",
    "replace",
    "unadapted",
    "unpack_kernel",
]

LAYER_TYPES: tuple[type[Any], ...] = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
"""Flax's layers that multiply by a kernel; others are never adapted."""


def can_be_adapted(layer: Any) -> bool:
    """Return whether a layer is one of `LAYER_TYPES` and computes its outputs as Flax does.

    A subclass with its own `__call__`, a layer with its own `dot_general`, and a kernel with extra
    dimensions, such as one stacked for a scan, can't be adapted.
    """
    if isinstance(layer, _AdaptedCall):
        return True
    layer_type = next((kind for kind in LAYER_TYPES if isinstance(layer, kind)), None)
    return (
        layer_type is not None
        and type(layer).__call__ is layer_type.__call__
        and getattr(layer, "dot_general", None) in (None, jax.lax.dot_general)
        and getattr(layer, "dot_general_cls", None) is None
        and getattr(layer, "einsum_op", None) in (None, jnp.einsum)
        and type(layer.kernel) is nnx.Param
        and (product := product_of(layer)) is not None
        and len(product.kernel) == len(layer.kernel.shape)
    )


def adapted(layer: Any) -> Any:
    """Return the adapted layer of a layer; a layer that is adapted already is returned itself."""
    own: Any = type(layer)
    return layer if isinstance(layer, _AdaptedCall) else _copy_as(layer, _adapted_class(own))


def unadapted(layer: Any) -> Any:
    """Return the plain layer of an adapted one.

    A layer that is plain, that has adapters or whose kernel is quantized is returned itself.
    """
    if has_adapters(layer) or isinstance(layer.kernel, QuantizedWeight):
        return layer
    return _copy_as(layer, layer.plain_class) if isinstance(layer, _AdaptedCall) else layer


def replace(model: Any, layers: Sequence[tuple[Any, Any]]) -> None:
    """Replace layers wherever they occur in a model.

    Args:
        model: the model, changed in place.
        layers: pairs of a layer of the model and its replacement.
    """
    successors = {id(old): new for old, new in layers if new is not old}
    if not successors:
        return
    nodes = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Pytree)]
    for node in nodes:
        for name, value in list(vars(node).items()):
            changed = _with_successors(value, successors)
            if changed is not value:
                setattr(node, name, changed)


def _with_successors(value: Any, successors: Mapping[int, Any]) -> Any:
    """Return an attribute's value with its layers replaced, also those in lists, tuples and dicts.

    A value that contains no layer to replace is returned itself.
    """
    if isinstance(value, dict):
        entries = {key: _with_successors(entry, successors) for key, entry in value.items()}
        return entries if any(entries[key] is not entry for key, entry in value.items()) else value
    if isinstance(value, list | tuple):
        items = [_with_successors(entry, successors) for entry in value]
        if all(new is entry for new, entry in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return successors.get(id(value), value)


def _copy_as(layer: Any, layer_class: type[Any]) -> Any:
    """Return a shallow copy of a layer, as `copy.copy` makes it, but of the class `layer_class`."""
    copy = object.__new__(layer_class)
    vars(copy).update(vars(layer))
    return copy


@functools.cache
def _adapted_class(plain: Any) -> Any:
    """Return the adapted class of a layer class.

    It is cached: with one class for all calls, equal models have equal graphdefs.
    """
    names = {"__doc__": plain.__doc__, "__module__": __name__, "plain_class": plain}
    bases = (_AdaptedCall, plain)
    return types.new_class(f"Adapted{plain.__name__}", bases, exec_body=lambda ns: ns.update(names))


def pack_kernel(layer: Any, settings: QuantizationSettings) -> None:
    """Quantize the kernel of an adapted layer."""
    layer.kernel = QuantizedWeight.pack(layer.kernel, contracted_axes(layer), settings)


def unpack_kernel(layer: Any) -> None:
    """Replace a layer's quantized kernel by its dequantized, floating values."""
    layer.kernel = layer.kernel.unpack()


def has_adapters(layer: Any) -> bool:
    """Return whether a layer has low-rank adapters."""
    return hasattr(layer, "kernel_lora_a")


def add_adapters(layer: Any, settings: LoraSettings, key: Any) -> None:
    """Add new adapters to an adapted layer; they change no output until they are trained."""
    product = product_of(layer)
    assert product is not None
    layer.kernel_lora_a, layer.kernel_lora_b = make_adapters(layer.kernel, product, settings, key)
    layer.kernel_lora_scale = settings.scale


def merge_adapters(layer: Any) -> None:
    """Add the adapters' effect to a layer's floating kernel, and set B to zero.

    Nothing happens if the kernel is abstract.
    """
    product = product_of(layer)
    assert product is not None
    a, b, kernel = layer.kernel_lora_a, layer.kernel_lora_b, layer.kernel

    arrays = kernel.get_value(), a.get_value(), b.get_value()
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        return
    # Traced arrays have no sharding, and neither have gathered ones, which are in host memory.
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
    """Return the function that merges adapters into a kernel; cached, so that jit can reuse it."""

    def merged(weight: Any, a: Any, b: Any) -> Any:
        delta = kernel_delta(a, b, product, scale)
        return (weight.astype(jnp.float32) + delta).astype(weight.dtype), jnp.zeros_like(b)

    return merged


def remove_adapters(layer: Any) -> None:
    """Remove a layer's adapters."""
    for name in ("kernel_lora_a", "kernel_lora_b", "kernel_lora_scale"):
        delattr(layer, name)


class _AdaptedCall:
    """Mixin with the `__call__` of adapted layers; it overrides that of the `plain_class`."""

    if TYPE_CHECKING:
        plain_class: Any

    def __call__(self, inputs: jax.Array, *arguments: Any, **keywords: Any) -> jax.Array:
        """Return the layer's outputs, with the effect of quantization and adapters.

        The arguments are those of the plain layer.
        """
        layer: Any = self
        product = product_of(layer, inputs.ndim)
        assert product is not None
        out: jax.Array
        if isinstance(layer.kernel, QuantizedWeight):
            out = _quantized_outputs(layer, inputs, product)
        else:
            plain: Any = super()
            out = plain.__call__(inputs, *arguments, **keywords)
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
    """Multiply rounded activations by a quantized weight.

    Rounding has no useful gradient, so the gradients are those of multiplying the unrounded
    activations (straight-through estimator).
    """
    import qwix

    with qwix_numerics():
        rounded = rounded_activations(product, method, inputs, array)

        def in_few_bits(rounded: Any, array: Any) -> jax.Array:
            out: jax.Array = qwix.einsum(product.equation, rounded, array, precision=precision)
            return out

        def in_floats(rounded: Any, array: Any) -> jax.Array:
            operands = qwix.dequantize(rounded), qwix.dequantize(array)
            return jnp.einsum(product.equation, *operands, precision=precision)

        if method.activation != jnp.int4:
            return in_few_bits(rounded, array)
        # XLA multiplies int4 by int4 on TPUs only. Elsewhere the same numbers multiply as floats.
        out: jax.Array = jax.lax.platform_dependent(
            rounded, array, tpu=in_few_bits, default=in_floats
        )
        return out


def rounded_activations(product: Product, method: Method, inputs: jax.Array, array: Any) -> Any:
    """Return activations rounded by a quantization method, as a `qwix.QArray`.

    Args:
        product: the layer's einsum.
        method: a method that rounds activations.
        inputs: the layer's inputs.
        array: the layer's quantized weight, a `qwix.QArray`.
    """
    import qwix

    rounded = qwix.quantize(
        inputs,
        method.activation,
        calibration_method=method.calibration,
        **_activation_groups(product, method, array),
    )
    if rounded.zero_point is not None or not jnp.issubdtype(
        rounded.qvalue.dtype, jnp.signedinteger
    ):
        return rounded
    # Qwix maps the largest input to half a step beyond the last code. If that input is negative,
    # rounding noise would decide between -128 and -127; so both become -127.
    lowest = -jnp.iinfo(rounded.qvalue.dtype).max
    wide = jnp.maximum(rounded.qvalue.astype(jnp.int8), jnp.int8(lowest))
    return dataclasses.replace(rounded, qvalue=wide.astype(rounded.qvalue.dtype))


def _activation_groups(product: Product, method: Method, array: Any) -> dict[str, Any]:
    """Return Qwix's arguments that say which input dimensions have separate scales.

    Each dimension that the product does not sum over does; with a grouped method, each group of
    the last summed dimension does too.
    """
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
