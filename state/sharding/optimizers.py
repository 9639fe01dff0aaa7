"""Sharding of optimizer state: each leaf follows the parameter that it mirrors.

A leaf of the optimizer mirrors the parameter whose path is contained in its own; of several, the
longest. If it has

- the parameter's shape (moments, accumulated gradients), it gets the parameter's sharding;
- one dimension less (Adafactor's row and column statistics), the sharding without that dimension;
- additional dimensions in front (L-BFGS's memory), the sharding with these dimensions whole;
- some dimensions of size 1 (SM3's accumulators), the sharding of the other dimensions.

Other small leaves (counters, hyperparameters, scales) are replicated; other large leaves are
sharded automatically.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from cairn.interop.placement.mirrors import (
    FACTORED,
    MIRRORS,
    REPLICATED,
    find_parameter,
    inherited_entries,
)
from cairn.interop.placement.rules import LARGE_LEAF_ELEMENTS
from cairn.state.paths import named_leaves
from cairn.state.sharding.mesh import mesh_text
from cairn.state.sharding.report import LeafPlacement, leaf_bytes
from cairn.state.sharding.rules import plan
from cairn.state.sharding.specs import short_spec

__all__ = ["explain_optimizer", "optimizer_shardings"]


@dataclass(frozen=True)
class _Parameter:
    shape: tuple[int, ...]
    sharding: Sharding | None


@dataclass(frozen=True)
class _Placement:
    rule: str
    sharding: Sharding | None
    parameter: _Parameter | None = None


def optimizer_shardings(opt_state: Any, params: Any) -> Any:
    """Return the optimizer state with a sharding in place of each leaf.

    A leaf gets None if the parameters have no shardings.

    Args:
        opt_state: the optimizer's state; may be abstract (`jax.eval_shape(tx.init, params)`).
        params: the parameters: arrays, or ShapeDtypeStructs with shardings.
    """
    places = [place.sharding for place in _places(opt_state, params)]
    return jax.tree.unflatten(jax.tree.structure(opt_state), places)


def explain_optimizer(
    opt_state: Any, params: Any, mesh: Mesh | AbstractMesh
) -> tuple[LeafPlacement, ...]:
    """Return the placement of each leaf of an optimizer state, for a report.

    Paths begin with "optimizer/". The `rule` of a leaf is "mirrors its parameter", "factored from
    its parameter", "automatic" or "replicated".

    Args:
        opt_state: the optimizer's state; may be abstract.
        params: the parameters, with shardings on the mesh.
        mesh: the mesh.
    """
    explained = []
    for named, place in zip(named_leaves(opt_state), _places(opt_state, params), strict=True):
        sharding = place.sharding
        assert isinstance(sharding, NamedSharding)
        nbytes = leaf_bytes(named.leaf)
        shape = tuple(np.shape(named.leaf))
        part = prod(sharding.shard_shape(shape)) / max(prod(shape), 1)
        parameter = None if place.parameter is None else place.parameter.sharding
        is_meant_whole = isinstance(parameter, NamedSharding) and parameter.is_fully_replicated
        is_large_and_whole = prod(shape) >= LARGE_LEAF_ELEMENTS and sharding.is_fully_replicated
        unmatched = None
        if is_large_and_whole and not is_meant_whole and mesh.size > 1:
            unmatched = f"large, and whole on every device of {mesh_text(mesh)} (shape {shape})"
        explained.append(
            LeafPlacement(
                path=f"optimizer/{named.readable_path}",
                shape=shape,
                dtype=str(named.leaf.dtype),
                rule=place.rule,
                spec=sharding.spec,
                nbytes=nbytes,
                bytes_per_device=round(nbytes * part),
                unmatched=unmatched,
            )
        )
    return tuple(explained)


def _places(opt_state: Any, params: Any) -> list[_Placement]:
    replicated = _replicated(params)
    parameters = {}
    for named in named_leaves(params):
        place = getattr(named.leaf, "sharding", None)
        if isinstance(replicated, NamedSharding) and isinstance(place, SingleDeviceSharding):
            place = replicated  # if others are on a mesh, one device counts as replicated
        path = tuple(named.path.split("/"))
        parameters[path] = _Parameter(tuple(np.shape(named.leaf)), place)
    return [
        _place(tuple(named.path.split("/")), tuple(np.shape(named.leaf)), parameters, replicated)
        for named in named_leaves(opt_state)
    ]


def _replicated(params: Any) -> Sharding | None:
    leaves = [leaf for leaf in jax.tree.leaves(params) if not isinstance(leaf, jax.core.Tracer)]
    places = [getattr(leaf, "sharding", None) for leaf in leaves]
    for place in places:
        if isinstance(place, NamedSharding):
            return NamedSharding(place.mesh, PartitionSpec())
    return next((place for place in places if isinstance(place, SingleDeviceSharding)), None)


def _place(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    parameters: dict[tuple[str, ...], _Parameter],
    replicated: Sharding | None,
) -> _Placement:
    prefix, _, parameter = find_parameter(path, parameters)
    if parameter is not None and parameter.shape == shape:
        return _Placement(MIRRORS, parameter.sharding, parameter)
    if parameter is not None and isinstance(parameter.sharding, NamedSharding):
        place = parameter.sharding
        entries = inherited_entries(prefix, shape, parameter.shape, tuple(place.spec))
        if entries is not None:
            kept = NamedSharding(place.mesh, short_spec(entries), memory_kind=place.memory_kind)
            return _Placement(FACTORED, kept, parameter)
    if isinstance(replicated, NamedSharding) and prod(shape) >= LARGE_LEAF_ELEMENTS:
        mesh = replicated.mesh
        (leaf,) = plan(jax.ShapeDtypeStruct(shape, np.uint8), mesh).leaves
        return _Placement(leaf.rule, NamedSharding(mesh, leaf.spec), parameter)
    return _Placement(REPLICATED, replicated, parameter)
