"""Device meshes: how to make one, find that of arrays, and show one as text."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.interpreters import partial_eval
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from cairn.counts import count_text
from cairn.interop.partition_axis import MESH_AXES
from cairn.interop.placement import specs
from cairn.state.errors import ShardingError

__all__ = [
    "compiling_mesh",
    "home_of",
    "make_mesh",
    "mesh_of",
    "mesh_text",
    "sharding_of",
]


def make_mesh(
    dims: Sequence[int],
    names: Sequence[str] = MESH_AXES,
    dcn_dims: Sequence[int] | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Return a device mesh with axes of type Auto, over which the compiler places values.

    With `dcn_dims` the mesh is hybrid, for devices in groups ("granules") with a slower network
    between them. A granule is a TPU slice if the devices have slices, else a process. Each axis has
    `dcn_dims` granules with `dims` devices each; neighbours along an axis are in the same granule
    as far as possible.

    Args:
        dims: number of devices along each axis; one of them may be -1 for all remaining devices.
            Without a -1, a mesh of fewer devices uses the first ones.
        names: name of each axis.
        dcn_dims: number of granules along each axis; one of them may be -1. None for a mesh that
            is not hybrid.
        devices: the devices to use; None for all devices of the job.

    Raises:
        ShardingError: if the dims do not fit the names or the devices.
    """
    available = list(jax.devices() if devices is None else devices)
    text = f"mesh {tuple(dims)} over axes {tuple(names)}"
    if len(dims) != len(names) or len(set(names)) != len(names):
        raise ShardingError(path=text, expected="one size for each of the distinct axis names")
    axis_types = (AxisType.Auto,) * len(names)
    if dcn_dims is not None:
        arranged = hybrid_devices(dims, dcn_dims, available, text=text)
        return Mesh(arranged, tuple(names), axis_types=axis_types)
    sizes = _resolved(dims, len(available), "devices", text)
    count = prod(sizes)
    if count > len(available):
        raise ShardingError(
            path=text,
            expected=count_text(count, "device"),
            found=count_text(len(available), "device"),
            next_step="use smaller axes, or put -1 for the axis that takes what is left",
        )
    if count < len(available) and jax.process_count() > 1 and devices is None:
        raise ShardingError(
            path=text,
            expected=f"all {len(available)} devices of the {jax.process_count()} processes",
            found=f"a mesh of {count}",
        )
    return jax.make_mesh(
        tuple(sizes), tuple(names), axis_types=axis_types, devices=available[:count]
    )


def hybrid_devices(
    dims: Sequence[int], dcn_dims: Sequence[int], devices: Sequence[Any], *, text: str
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return devices as an array of shape `dims * dcn_dims`, for a hybrid mesh; see `make_mesh`.

    Raises:
        ShardingError: if the dims do not fit the devices of a granule or the granules.
    """
    text = f"{text}, {tuple(dcn_dims)} over slices"
    if len(dcn_dims) != len(dims):
        raise ShardingError(
            path=text,
            expected=f"{len(dims)} sizes in sharding_dcn_axis_dims, one for each mesh axis",
            found=f"{len(dcn_dims)}",
        )
    by_slice = len({getattr(device, "slice_index", None) for device in devices}) > 1
    key = "slice_index" if by_slice else "process_index"
    granule, what = ("slice", "slices") if by_slice else ("process", "processes")
    counts: dict[int, int] = {}
    for device in devices:
        counts[getattr(device, key)] = counts.get(getattr(device, key), 0) + 1
    if len(set(counts.values())) != 1:
        raise ShardingError(path=text, expected=f"{what} of one size", found=f"devices {counts}")
    (each,) = set(counts.values())
    granules = _resolved(dcn_dims, len(counts), what, text)
    sizes = _resolved(dims, each, f"devices in each of the {what}", text)
    if prod(granules) != len(counts) or prod(sizes) != each:
        raise ShardingError(
            path=text,
            expected=f"{count_text(prod(granules), granule)} "
            f"(sharding_dcn_axis_dims {tuple(dcn_dims)}) of "
            f"{count_text(prod(sizes), 'device')} (sharding_axis_dims {tuple(dims)})",
            found=f"{count_text(len(counts), granule)} of {count_text(each, 'device')}",
            next_step="make the products equal to these, or put -1 for one axis",
        )
    arranged: np.ndarray[Any, np.dtype[Any]] = mesh_utils.create_hybrid_device_mesh(
        tuple(sizes), tuple(granules), devices, process_is_granule=not by_slice
    )
    return arranged


def _resolved(dims: Sequence[int], count: int, what: str, text: str) -> list[int]:
    """Return the sizes, with -1 replaced so that their product is `count`.

    Raises:
        ShardingError: if a size is invalid, or the other sizes do not divide `count`.
    """
    if any(size != -1 and size < 1 for size in dims) or list(dims).count(-1) > 1:
        raise ShardingError(path=text, expected="sizes of 1 or more, and at most one -1")
    fixed = prod(size for size in dims if size != -1)
    if -1 in dims and count % fixed:
        raise ShardingError(
            path=text,
            expected=f"a number of {what} that {fixed} divides",
            found=f"{count} {what}",
        )
    return [count // fixed if size == -1 else size for size in dims]


def mesh_text(mesh: Mesh | AbstractMesh) -> str:
    """Return a mesh as text, such as "dp=2, fsdp=4, tp=1, sp=1"."""
    return specs.mesh_text(mesh.shape)


def mesh_of(tree: Any) -> Mesh | None:
    """Return the mesh of the first leaf that has one; None if no leaf has, or all are traced."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer):
            continue
        place = getattr(leaf, "sharding", None)
        if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
            return place.mesh
    return None


def sharding_of(leaf: Any) -> Any:
    """Return an array's sharding; None for a tracer, which has none, and for other objects."""
    return None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)


def home_of(tree: Any) -> Sharding | None:
    """Return the sharding for new small leaves that are used together with a tree.

    It is replicated over the tree's mesh, or the device that the tree's leaves are committed to.
    None if they have neither, or are traced.
    """
    mesh = mesh_of(tree)
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    for leaf in jax.tree.leaves(tree):
        bound = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if bound and leaf.committed and isinstance(leaf.sharding, SingleDeviceSharding):
            return leaf.sharding
    return None


def compiling_mesh(tree: Any) -> AbstractMesh | None:
    """Return the mesh of values that are traced under `jax.jit`.

    None if there is nothing to constrain: outside of jit, on one device, and on a mesh with axes
    that are not of type Auto.
    """
    for leaf in jax.tree.leaves(tree):
        # JAX has no public test for "under jit"; under jax.grad, jit's tracer is wrapped.
        inner = leaf
        while isinstance(inner, jax.core.Tracer) and hasattr(inner, "primal"):
            inner = inner.primal
        if not isinstance(inner, partial_eval.DynamicJaxprTracer):
            continue
        mesh = getattr(jax.typeof(inner).sharding, "mesh", None)
        if isinstance(mesh, AbstractMesh) and not mesh.empty:
            automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
            return mesh if automatic and mesh.size > 1 else None
    return None
