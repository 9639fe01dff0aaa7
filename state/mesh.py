"""Device meshes: making them, finding them on arrays, naming them."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from state.errors import ShardingError

__all__ = ["MESH_AXES", "make_mesh", "mesh_of", "mesh_text"]

MESH_AXES = ("dp", "fsdp", "tp", "sp")
"""Data parallel, fully sharded data parallel, tensor parallel, sequence parallel."""


def make_mesh(
    dims: Sequence[int],
    names: Sequence[str] = MESH_AXES,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Makes a device mesh whose axes the compiler places (Auto axis types).

    Args:
        dims: devices along each axis; one of them may be -1, which takes what is left. Without a
            -1 the mesh may use fewer devices than there are, the first ones.
        names: name of each axis.
        devices: the devices to use, all of this run's by default.

    Raises:
        ShardingError: if the dims do not fit the names or the devices.
    """
    available = list(jax.devices() if devices is None else devices)
    text = f"mesh {tuple(dims)} over axes {tuple(names)}"
    if len(dims) != len(names) or len(set(names)) != len(names):
        raise ShardingError(path=text, expected="one size for each of the distinct axis names")
    if any(size != -1 and size < 1 for size in dims) or list(dims).count(-1) > 1:
        raise ShardingError(path=text, expected="sizes of 1 or more, and at most one -1")
    fixed = prod(size for size in dims if size != -1)
    if -1 in dims and len(available) % fixed:
        raise ShardingError(
            path=text,
            expected=f"a number of devices that {fixed} divides",
            found=f"{len(available)} devices",
        )
    sizes = [len(available) // fixed if size == -1 else size for size in dims]
    count = prod(sizes)
    if count > len(available):
        raise ShardingError(
            path=text,
            expected=f"{count} devices",
            found=f"{len(available)} devices",
            next_step="use smaller axes, or put -1 for the axis that takes what is left",
        )
    if count < len(available) and jax.process_count() > 1 and devices is None:
        raise ShardingError(
            path=text,
            expected=f"all {len(available)} devices of the {jax.process_count()} processes",
            found=f"a mesh of {count}",
        )
    return jax.make_mesh(
        tuple(sizes),
        tuple(names),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=available[:count],
    )


def mesh_text(mesh: Mesh) -> str:
    """Returns a mesh as text, such as "dp=2, fsdp=4, tp=1, sp=1"."""
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh that a tree's leaves are on, or None if they are on none (or traced)."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer):
            continue
        place = getattr(leaf, "sharding", None)
        if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
            return place.mesh
    return None
