"""Quantized weight: packing, sharding and unpacking it. Qwix does the arithmetic.

The weight is quantized on its devices: each packs its own shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from cairn.interop.names import EasyDeLQuantizationMethods
from cairn.interop.partition_axis import entry_axes
from cairn.interop.placement.decoder_axes import scale_axes
from cairn.state.adapters.quantization import METHODS, QuantizationSettings, group_length
from cairn.state.errors import OptimizerError
from cairn.state.paths import is_variable, named_leaves
from cairn.state.sharding.mesh import sharding_of
from cairn.state.sharding.specs import short_spec

__all__ = [
    "PackedParam",
    "QuantizedWeight",
    "axes_of",
    "check_trainable",
    "dequantize",
    "map_parameters",
    "qwix_numerics",
]


class PackedParam(nnx.Param[Any]):
    """Parameter that is part of a quantized weight; changes of a model's dtype leave it alone."""


def map_parameters(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of a tree's parameters; quantized weights stay as they are."""

    def map_node(node: Any) -> Any:
        is_plain = isinstance(node, nnx.Param) and not isinstance(node, PackedParam)
        return jax.tree.map(function, node) if is_plain else node

    return jax.tree.map(map_node, tree, is_leaf=is_variable)


class QuantizedWeight(nnx.Pytree):
    """Quantized weight in place of the layer's `kernel`.

    Attributes:
        method: the quantization method; it also says how activations are rounded.
        array: a `qwix.QArray` of `PackedParam`s: `qvalue` in the weight's own shape, `scale` with
            one entry per group and channel. The weight is `qvalue * scale`, for nf4
            `table[qvalue] * scale`.
    """

    def __init__(self, method: EasyDeLQuantizationMethods, array: Any) -> None:
        self.method = method
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, the same quantized as floating."""
        return tuple(self.array.qvalue.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the weight."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the weight before it was quantized."""
        return self.array.scale.dtype

    @property
    def axes(self) -> tuple[str | None, ...] | None:
        """Logical axis names of the weight, if it has any."""
        return axes_of(self.array.qvalue)

    def arrays(self) -> Any:
        """Return the `qwix.QArray` with plain arrays instead of `PackedParam`s."""
        return jax.tree.map(
            lambda param: param.get_value(),
            self.array,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )

    def __getitem__(self, index: Any) -> Any:
        """Return the dequantized weight, indexed as an array is."""
        return dequantize(self.arrays())[index]

    @classmethod
    def pack(
        cls, param: nnx.Param[Any], contracted: Sequence[int], settings: QuantizationSettings
    ) -> Self:
        """Quantize a weight, each shard on its device.

        A ShapeDtypeStruct gives an abstract result.

        Args:
            param: a floating weight.
            contracted: dimensions of the weight that its layer sums over; groups divide the last.
            settings: method and group size.
        """
        value = param.get_value()
        run = _quantizer(tuple(contracted), value.shape, settings.method, settings.group_size)
        if isinstance(value, jax.ShapeDtypeStruct):
            quantized = jax.eval_shape(run, value)
        elif not isinstance(place := sharding_of(value), NamedSharding):
            quantized = jax.jit(run)(value)
        else:
            quantized = _sharded(run, place, value.shape, value.dtype, tuple(contracted))(value)
            # One at a time: on CPU, many programs in flight that exchange shards can deadlock.
            jax.block_until_ready(quantized)
        names = axes_of(param)
        qvalue = PackedParam.from_metadata(quantized.qvalue, dict(param.get_metadata()))
        scale = PackedParam(quantized.scale)
        if names is not None:
            shapes = np.shape(quantized.qvalue), np.shape(quantized.scale)
            scale.set_metadata("axes", scale_axes(names, *shapes))
        packed = type(quantized)(qvalue=qvalue, scale=scale, qtype=quantized.qtype)
        return cls(settings.method, packed)

    def unpack(self) -> nnx.Param[Any]:
        """Return the weight as a floating parameter of the dtype that it had before `pack`."""
        array = self.arrays()
        value = array.qvalue
        if isinstance(value, jax.ShapeDtypeStruct):
            floating = jax.eval_shape(dequantize, array)
        elif isinstance(place := sharding_of(value), NamedSharding):
            floating = jax.block_until_ready(jax.jit(dequantize, out_shardings=place)(array))
        else:
            floating = jax.jit(dequantize)(array)
        param: nnx.Param[Any] = nnx.Param.from_metadata(
            floating, dict(self.array.qvalue.get_metadata())
        )
        return param


def check_trainable(params: Any) -> None:
    """Check that no parameter is part of a quantized weight.

    Raises:
        OptimizerError: if a parameter is; says how to train a quantized model.
    """
    packed = [named.path for named in named_leaves(params) if named.variable_type is PackedParam]
    if packed:
        raise OptimizerError(
            path="optimizer",
            expected="floating parameters",
            found=f"{len(packed)} parts of quantized weights, the first at {packed[0]}",
            next_step="call apply_lora_to_layers() and train the adapters, or dequantize() first",
        )


def axes_of(param: Any) -> tuple[str | None, ...] | None:
    """Return the logical axis names of a parameter; None if it has none."""
    axes = param.get_metadata().get("axes")
    return None if axes is None else tuple(axes)


def dequantize(array: Any) -> jax.Array:
    """Return the floating values of a `qwix.QArray` of plain arrays, in its scale's dtype.

    The values equal those of `qwix.dequantize`. For nf4, Qwix flattens the weight, which a mesh
    that splits two dimensions would have to gather first; this function keeps the weight's shape.
    """
    import qwix

    with qwix_numerics():
        floating: jax.Array
        if array.qtype != "nf4":
            floating = qwix.dequantize(array)
            return floating
        values = jnp.asarray(_nf4_table())[array.qvalue.astype(jnp.int32)]
        values = values.astype(array.scale.dtype)
        whole, grouped = [], []
        for length, groups in zip(values.shape, array.scale.shape, strict=True):
            whole += [groups, length // groups]
            grouped += [groups, 1]
        floating = (values.reshape(whole) * array.scale.reshape(grouped)).reshape(values.shape)
        return floating


@functools.cache
def _nf4_table() -> np.ndarray[Any, Any]:
    """Return the 16 values of nf4, computed by Qwix."""
    import qwix

    with jax.ensure_compile_time_eval(), qwix_numerics():
        codes = jnp.arange(16, dtype=jnp.int32).astype(jnp.uint4)
        ones = jnp.ones((1,), jnp.float32)
        return np.asarray(qwix.dequantize(qwix.QArray(codes, ones, qtype="nf4")))


@contextmanager
def qwix_numerics() -> Iterator[None]:
    """Trace the body with JAX's usual promotion, which Qwix's own arithmetic relies on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.lru_cache(maxsize=1024)
def _quantizer(
    contracted: tuple[int, ...],
    shape: tuple[int, ...],
    method: EasyDeLQuantizationMethods,
    group_size: int,
) -> Any:
    """Return a function that quantizes weights of one shape; cached, so that jit can reuse it.

    Args:
        contracted: dimensions of the weight that its layer sums over; groups divide the last.
        shape: shape of the weight.
        method: the quantization method.
        group_size: number of inputs that share a scale; -1 for all.
    """
    import qwix

    tiled = contracted[-1]
    channels = tuple(axis for axis in range(len(shape)) if axis not in contracted)

    def run(value: jax.Array) -> Any:
        with qwix_numerics():
            return qwix.quantize(
                value,
                METHODS[method].weight,
                channelwise_axes=channels,
                tiled_axes={tiled: group_length(shape[tiled], group_size)},
            )

    return run


@functools.lru_cache(maxsize=1024)
def _sharded(
    run: Any, place: NamedSharding, shape: tuple[int, ...], dtype: Any, contracted: tuple[int, ...]
) -> Any:
    """Return `run` compiled so that every device quantizes its own shard of the weight.

    If a group would span two devices, the mesh axes that split the groups split the channels
    instead. If they do not divide the channels either, this one weight is gathered. Each array of
    the result gets the weight's sharding, on those dimensions that the sharding divides.
    """
    shapes = jax.eval_shape(run, jax.ShapeDtypeStruct(shape, dtype))
    entries = [*place.spec, *[None] * (len(shape) - len(place.spec))]
    local = list(entries)
    for axis in contracted:
        entry = entries[axis]
        if shapes.scale.shape[axis] % _parts(place, entry) == 0:
            continue
        local[axis] = None
        free = [other for other in range(len(shape)) if other not in contracted]
        for other in free:
            both = (*entry_axes(local[other]), *entry_axes(entry))
            if shape[other] % _parts(place, both) == 0:
                local[other] = both
                break

    def spec(leaf: Any, target: Sequence[Any]) -> PartitionSpec:
        pairs = zip(target, leaf.shape, strict=True)
        return short_spec(
            entry if length % _parts(place, entry) == 0 else None for entry, length in pairs
        )

    shardwise = jax.shard_map(
        run,
        mesh=place.mesh,
        in_specs=short_spec(local),
        out_specs=jax.tree.map(lambda leaf: spec(leaf, local), shapes),
    )
    ends = jax.tree.map(lambda leaf: NamedSharding(place.mesh, spec(leaf, entries)), shapes)
    return jax.jit(shardwise, out_shardings=ends)


def _parts(place: NamedSharding, entry: Any) -> int:
    return math.prod(place.mesh.shape[axis] for axis in entry_axes(entry))
