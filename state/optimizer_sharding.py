"""Where optimizer state goes: each leaf follows the parameter that it mirrors.

An optimizer leaf mirrors the parameter whose path is the longest suffix of its own path. With the
parameter's shape (momentum, second moments, accumulated gradients) it takes the parameter's
placement. With one dimension less (Adafactor's row and column statistics) it takes the placement
without that dimension. Everything else (counters, hyperparameters, scales) is replicated.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from state.mesh import mesh_of
from state.optax_numerics import optax_numerics
from state.paths import named_leaves
from state.placement import LeafPlacement, leaf_bytes

__all__ = ["explain_optimizer", "init_optimizer", "optimizer_shardings"]


@dataclass(frozen=True)
class _Parameter:
    shape: tuple[int, ...]
    sharding: Sharding | None


def optimizer_shardings(opt_state: Any, params: Any) -> Any:
    """Returns the optimizer state with a sharding in place of each leaf, None if there is none.

    Args:
        opt_state: the optimizer's state; shapes are enough (`jax.eval_shape(tx.init, params)`).
        params: the parameters, with their shardings (arrays, or ShapeDtypeStructs that have one).
    """
    mirrored = {
        tuple(named.path.split("/")): _parameter(named.leaf) for named in named_leaves(params)
    }
    replicated = _replicated(params)
    places = [
        _place(tuple(named.path.split("/")), np.shape(named.leaf), mirrored, replicated)
        for named in named_leaves(opt_state)
    ]
    return jax.tree.unflatten(jax.tree.structure(opt_state), places)


def init_optimizer(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the initial optimizer state, each leaf made directly where it belongs.

    Abstract parameters (ShapeDtypeStructs) give an abstract state with shardings. Parameters that
    are bound to no device give a state that is not either.
    """
    leaves = jax.tree.leaves(params)
    with optax_numerics():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return tx.init(params)
        shapes = jax.eval_shape(tx.init, params)
        shardings = optimizer_shardings(shapes, params)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return jax.tree.map(
                lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
                shapes,
                shardings,
            )
        if not any(getattr(leaf, "committed", False) for leaf in leaves):
            return jax.jit(tx.init)(params)
        return jax.jit(tx.init, out_shardings=shardings)(params)


def explain_optimizer(opt_state: Any, params: Any, mesh: Mesh) -> tuple[LeafPlacement, ...]:
    """Says where each leaf of an optimizer state goes, given where the parameters are.

    Paths begin with "optimizer/"; the rule is "mirrors its parameter" or "replicated".
    """
    places = jax.tree.leaves(optimizer_shardings(opt_state, params))
    explained = []
    for named, place in zip(named_leaves(opt_state), places, strict=True):
        nbytes = leaf_bytes(named.leaf)
        shape = tuple(np.shape(named.leaf))
        part = prod(place.shard_shape(shape)) / max(prod(shape), 1)
        explained.append(
            LeafPlacement(
                path=f"optimizer/{named.path}",
                shape=shape,
                dtype=str(named.leaf.dtype),
                rule="mirrors its parameter" if place.spec else "replicated",
                spec=place.spec,
                nbytes=nbytes,
                bytes_per_device=round(nbytes * part),
            )
        )
    return tuple(explained)


def _parameter(leaf: Any) -> _Parameter:
    return _Parameter(tuple(np.shape(leaf)), getattr(leaf, "sharding", None))


def _replicated(params: Any) -> Sharding | None:
    mesh = mesh_of(params)
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    for leaf in jax.tree.leaves(params):
        if isinstance(getattr(leaf, "sharding", None), SingleDeviceSharding):
            place: Sharding = leaf.sharding
            return place
    return None


def _place(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    parameters: dict[tuple[str, ...], _Parameter],
    replicated: Sharding | None,
) -> Sharding | None:
    for start in range(len(path)):
        parameter = parameters.get(path[start:])
        if parameter is None:
            continue
        if parameter.shape == shape:
            return parameter.sharding
        if isinstance(parameter.sharding, NamedSharding):
            dropped = _dropped_dimension(path[:start], shape, parameter)
            return replicated if dropped is None else _without(parameter, dropped)
        break
    return replicated


def _dropped_dimension(
    prefix: tuple[str, ...], shape: tuple[int, ...], parameter: _Parameter
) -> int | None:
    """Finds which dimension of the parameter a factored leaf has averaged away.

    Equal dimensions leave a choice. Adafactor's is known: it factors over the two longest
    dimensions, in the order of a sort by length, `v_row` without the last and `v_col` without the
    one before it. Any other leaf with a choice is replicated: never wrong, only larger.
    """
    whole = parameter.shape
    candidates = [
        dimension
        for dimension in range(len(whole))
        if whole[:dimension] + whole[dimension + 1 :] == shape
    ]
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    by_length = [int(dimension) for dimension in np.argsort(whole)]
    if "v_row" in prefix:
        return by_length[-1]
    if "v_col" in prefix:
        return by_length[-2]
    specs = {_without(parameter, dimension) for dimension in candidates}
    return candidates[0] if len(specs) == 1 else None


def _without(parameter: _Parameter, dropped: int) -> NamedSharding:
    place = parameter.sharding
    assert isinstance(place, NamedSharding)
    entries = [*place.spec, *[None] * (len(parameter.shape) - len(place.spec))]
    del entries[dropped]
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(place.mesh, PartitionSpec(*entries), memory_kind=place.memory_kind)
