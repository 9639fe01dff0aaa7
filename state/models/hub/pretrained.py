"""Load of pretrained weights into a new model, slice by slice, onto the devices of each slice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.conversion.ops import Array
from cairn.interop.conversion.rules import Rule, match
from cairn.interop.conversion.tensor_streams import float_dtype
from cairn.interop.errors import ArgumentError, ConversionError
from cairn.interop.weights.export import rule_table
from cairn.interop.weights.files import PretrainedWeights
from cairn.interop.weights.rule_slices import one_dtype
from cairn.interop.weights.weight_source import WeightSource
from cairn.state.adapters.layers import layers_to_quantize
from cairn.state.adapters.models import build_abstract
from cairn.state.adapters.quantization import QuantizationSettings
from cairn.state.adapters.quantization_request import filled, quantize_layer
from cairn.state.checkpointing.processes import agreement
from cairn.state.models.hub.shares import Target, exchanged, read_places, read_rule, spans_processes
from cairn.state.paths import NamedLeaf, named_leaves
from cairn.state.sharding.rules import module_plan
from cairn.storage.arrays.dtypes import is_floating

_TOGETHER_BYTES: Final = 1 << 30
"""Minimum bytes of weights, over all processes, that are read before the processes synchronize."""

_PASSING = (nnx.RngState, nnx.Cache, nnx.Intermediate)

Model = TypeVar("Model", bound=nnx.Module)
Placement = Callable[[Any], Mapping[str, Sharding]]


def is_weight(path: Any, node: Any) -> bool:
    """Return whether a variable is written to a pretrained folder.

    All variables are, except random streams, caches and intermediate results of a forward pass.
    Running averages, such as those of a BatchNorm, are written, since the model computes with them.
    """
    dtype = getattr(node, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return not isinstance(node, _PASSING) and not is_key


def load_weights(
    model_class: type[Model],
    pretrained: PretrainedWeights,
    *,
    dtype: Any,
    param_dtype: Any,
    precision: Any,
    place: Placement,
    quantization: QuantizationSettings | None = None,
) -> Model:
    """Return a new model with pretrained weights.

    Each process reads the slices that its devices hold, casts them on the host and places them, one
    after the other. Host memory holds one slice (or the slices of a rule that share bytes) and one
    that is being transferred. A device holds its own shards, and one leaf's twice while processes
    exchange it. If weights go to the devices of several processes, all of these must call this.

    Args:
        model_class: class of the model. It is first built without arrays, so its `__init__` must
            not use the values of its weights.
        pretrained: config and weights.
        dtype: dtype of the computation.
        param_dtype: dtype to cast floating weights to; None keeps the dtype of each.
        precision: precision of matrix multiplications; None for JAX's default.
        place: function from the abstract weights to their shardings, by path.
        quantization: settings by which each kernel is quantized once it is placed; None for none.

    Raises:
        ArgumentError: these settings can't quantize the model.
        ConversionError: tensors are missing, unexpected, of a wrong shape, or not floating for
            floating weights; or several dtypes would become one weight, and `param_dtype` is None.
            All are listed.
    """
    cast = float_dtype(param_dtype, argument="param_dtype")
    options = {
        "dtype": float_dtype(dtype, argument="dtype"),
        "param_dtype": cast or most_common_float(pretrained.weights.dtypes.values()),
        "precision": precision,
    }

    def make(rngs: nnx.Rngs) -> Model:
        built: Model = model_class(pretrained.config, **options, rngs=rngs)
        return built

    model = build_abstract(make)
    layers: dict[str, Any] = {}
    if quantization is not None:
        # Try it without arrays, to raise errors before anything is read.
        method, size = quantization.method, quantization.group_size
        build_abstract(lambda rngs: make(rngs).quantize(method, size, quantization.pattern))
        layers = layers_to_quantize(model, quantization)
    graphdef, weights, others = nnx.split(model, is_weight, ...)
    leaves = {named.path: named for named in named_leaves(weights)}
    shapes = {path: tuple(named.leaf.shape) for path, named in leaves.items()}
    table = pretrained.own_rules(shapes) or rule_table(pretrained.config, shapes)
    rules = match(table, leaves=shapes, tensors=pretrained.weights.shapes, path=pretrained.path)
    dtypes = {path: named.leaf.dtype for path, named in leaves.items()}
    _refuse_numbers(rules, dtypes, pretrained)
    _refuse_several_dtypes(rules, pretrained, cast)
    shardings = place(weights)
    stored = [
        one_dtype([pretrained.weights.dtypes[name] for name in rule.tensors]) for rule in rules
    ]

    def target(path: str, dtype: np.dtype[Any]) -> Target:
        own_dtype = dtype if cast is None else _target_dtype(dtype, leaves[path], cast)
        return Target(path, shapes[path], own_dtype, shardings[path])

    targets = [
        [target(path, dtype) for path in rule.leaves]
        for rule, dtype in zip(rules, stored, strict=True)
    ]
    spread = spans_processes(shardings.values())
    placed: dict[str, jax.Array] = {}
    for batch in _batches(targets, _TOGETHER_BYTES if spread else 0):
        read = partial(_read, pretrained.weights, [(rules[n], targets[n]) for n in batch])
        # An error in one process is raised in all, so that none waits for it in an exchange.
        arrays = agreement.all_or_none(read) if spread else read()
        for aim in (target_leaf for n in batch for target_leaf in targets[n]):
            array = exchanged(arrays.pop(aim.path), aim)
            if aim.path in layers and quantization is not None:
                quantize_layer(layers[aim.path], array, quantization)
            else:
                placed[aim.path] = array
    if quantization is not None:
        model = filled(model, placed, quantization)
        graphdef, weights, others = nnx.split(model, is_weight, ...)
    else:
        ordered = [placed[path] for path in leaves]
        weights = jax.tree.unflatten(jax.tree.structure(weights), ordered)
    if jax.tree.leaves(others):
        # Variables that are no weights get the initial values of the class.
        others = jax.jit(lambda: nnx.split(make(nnx.Rngs(0)), is_weight, ...)[2])()
    made_of: Model = nnx.merge(graphdef, weights, others)
    return made_of


def _read(
    source: WeightSource, rules: Sequence[tuple[Rule, Sequence[Target]]]
) -> dict[str, jax.Array]:
    """Return the leaves of some rules by path, with the shardings into which they are read."""
    leaves: dict[str, jax.Array] = {}
    for rule, targets in rules:
        arrays = read_rule(source, rule, targets, read_places(source, rule, targets))
        leaves |= {target.path: array for target, array in zip(targets, arrays, strict=True)}
    return leaves


def _batches(targets: Sequence[Sequence[Target]], least: int) -> Iterator[list[int]]:
    """Yield the numbers of rules in batches of at least `least` bytes of target leaves."""
    batch: list[int] = []
    size = 0
    for number, rule in enumerate(targets):
        batch.append(number)
        size += sum(math.prod(target.shape) * target.dtype.itemsize for target in rule)
        if size >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _refuse_numbers(
    rules: Iterable[Rule], dtypes: Mapping[str, Any], pretrained: PretrainedWeights
) -> None:
    """Raise ConversionError if integers, bools or complex numbers would become floating weights."""
    stored = pretrained.weights.dtypes
    problems = [
        f"dtype of {name}: expected a floating one for {', '.join(rule.leaves)}, "
        f"found {stored[name]}"
        for rule in rules
        if all(is_floating(dtypes[path]) for path in rule.leaves)
        for name in rule.tensors
        if not is_floating(stored[name])
    ]
    if problems:
        raise ConversionError(
            path=pretrained.path,
            expected="floating tensors for floating weights",
            found=f"{len(problems)} that are not",
            next_step="take the weights as they were before quantization, or dequantize them",
            problems=problems,
        )


def _refuse_several_dtypes(
    rules: Iterable[Rule], pretrained: PretrainedWeights, cast: np.dtype[Any] | None
) -> None:
    """Raise ConversionError if tensors of several dtypes would become one weight without a cast."""
    stored = pretrained.weights.dtypes
    problems = [
        f"{', '.join(rule.leaves)}: {', '.join(f'{name} {stored[name]}' for name in rule.tensors)}"
        for rule in rules
        if cast is None and len({stored[name] for name in rule.tensors}) > 1
    ]
    if problems:
        raise ConversionError(
            path=pretrained.path,
            expected="tensors of one dtype where they become one weight",
            found=f"{len(problems)} weights of several",
            next_step="pass a param_dtype, to which all floating weights are cast",
            problems=problems,
        )


def put(values: Array, dtype: np.dtype[Any], sharding: Sharding) -> jax.Array:
    """Return a host array on its devices; each device gets a copy of its own part only."""

    def part(index: Any) -> Array:
        return np.array(values[index], dtype=dtype, order="C")

    return jax.make_array_from_callback(values.shape, sharding, part, dtype=dtype)


def placement(
    config: EDPretrainedConfig,
    *,
    mesh: Mesh | None,
    partition_rules: Any,
    auto_shard_model: bool,
    device: Any,
) -> Placement:
    """Return the function that decides the shardings of a model's weights.

    With `auto_shard_model` they are sharded over the mesh, else all on one device.

    Args:
        config: configuration of the model, which has a mesh and rules of its own.
        mesh: the mesh; None for the config's.
        partition_rules: pairs of a regular expression and a PartitionSpec; None for the config's.
        auto_shard_model: whether to shard the weights.
        device: the one device without `auto_shard_model`; None for the first local one.

    Raises:
        ArgumentError: `device` contradicts `auto_shard_model`, or a job of several processes is to
            use one device.
        ShardingError: raised by the returned function if the mesh does not divide some weights.
    """
    if auto_shard_model:
        if device is not None:
            raise ArgumentError(
                path="device",
                expected="auto_shard_model=False",
                found=f"device={device} and auto_shard_model=True",
            )

        def over_mesh(params: Any) -> Mapping[str, Sharding]:
            report = module_plan(params, config, partition_rules, mesh).raise_for_problems()
            return {leaf.path: NamedSharding(report.mesh, leaf.spec) for leaf in report.leaves}

        return over_mesh
    if jax.process_count() > 1:
        raise ArgumentError(
            path="auto_shard_model=False",
            expected="one process",
            found=f"{jax.process_count()}: one device can't be seen by all of them",
            next_step="leave auto_shard_model on",
        )
    sharding = SingleDeviceSharding(jax.local_devices()[0] if device is None else device)
    return lambda params: {named.path: sharding for named in named_leaves(params)}


def _target_dtype(
    stored: np.dtype[Any], leaf: NamedLeaf, param_dtype: np.dtype[Any]
) -> np.dtype[Any]:
    """Return the dtype that a stored weight is cast to.

    Integers keep theirs, floating parameters get `param_dtype`, other floating variables the dtype
    that the model's class gives them.
    """
    if not is_floating(stored):
        return stored
    is_parameter = leaf.variable_type is not None and issubclass(leaf.variable_type, nnx.Param)
    return param_dtype if is_parameter else np.dtype(leaf.leaf.dtype)


def most_common_float(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the most common floating dtype, the first of equals; float32 if there is none."""
    floating = Counter(dtype for dtype in dtypes if is_floating(dtype))
    return floating.most_common(1)[0][0] if floating else np.dtype(np.float32)
