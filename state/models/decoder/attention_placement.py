"""Sharding constraints on attention's activations, for compilations over a mesh."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from cairn.interop.partition_axis import AxisEntry, PartitionAxis, entry_axes
from cairn.state.sharding.mesh import compiling_mesh

__all__ = ["place_keys", "place_queries"]


def place_queries(array: jax.Array, axis: PartitionAxis | None, sharded: bool) -> jax.Array:
    """Constrain the sharding of queries or attended values, (batch, tokens, heads, head size).

    Args:
        array: the values; returned unchanged outside of a compilation over a mesh.
        axis: mesh axes of each dimension; None leaves the sharding to the compiler.
        sharded: False replicates tokens, heads and head size; only the batch is sharded.
    """
    own = axis or PartitionAxis()
    entries = (own.batch_axis, own.sequence_axis, own.head_axis, own.attention_dim_axis)
    return _place(array, entries, axis, sharded)


def place_keys(array: jax.Array, axis: PartitionAxis | None, sharded: bool) -> jax.Array:
    """Constrain the sharding of keys or values, (batch, tokens, key/value heads, head size).

    Args:
        array: the values; returned unchanged outside of a compilation over a mesh.
        axis: mesh axes of each dimension; None leaves the sharding to the compiler.
        sharded: False replicates tokens, heads and head size; only the batch is sharded.
    """
    own = axis or PartitionAxis()
    entries = (own.batch_axis, own.key_sequence_axis, own.key_head_axis, own.attention_dim_axis)
    return _place(array, entries, axis, sharded)


def _place(
    array: jax.Array, entries: tuple[AxisEntry, ...], axis: PartitionAxis | None, sharded: bool
) -> jax.Array:
    if sharded and axis is None:
        return array
    mesh = compiling_mesh(array)
    if mesh is None:
        return array
    rows = PartitionSpec.UNCONSTRAINED if axis is None else entries[0]
    spec = (rows, *entries[1:]) if sharded else (rows, None, None, None)
    taken: set[str] = set()
    fitted = [
        _fitting(entry, size, mesh, taken) for entry, size in zip(spec, array.shape, strict=True)
    ]
    placed: jax.Array = jax.lax.with_sharding_constraint(
        array, NamedSharding(mesh, PartitionSpec(*fitted))
    )
    return placed


def _fitting(entry: Any, size: int, mesh: AbstractMesh, taken: set[str]) -> Any:
    """Return the mesh axes for a dimension.

    If they do not divide its size, the compiler chooses: unlike for weights that is no error, since
    a batch may well have one row.

    Args:
        entry: the requested mesh axes.
        size: size of the dimension.
        mesh: the mesh.
        taken: mesh axes of earlier dimensions, which are left out; extended by those used here.
    """
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names = tuple(name for name in entry_axes(entry) if name in mesh.shape and name not in taken)
    taken.update(names)
    if size % prod(mesh.shape[name] for name in names):
        return PartitionSpec.UNCONSTRAINED
    return names or None
