"""Entries of a partition spec: for each dimension a mesh axis, several, or None."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from cairn.interop.partition_axis import AxisEntry, entry_axes

__all__ = [
    "Entries",
    "MeshSizes",
    "mesh_text",
    "shard_count",
    "shard_shape",
    "splitting_axes",
    "without_trailing_nones",
]

Entries = tuple[AxisEntry, ...]

MeshSizes = Mapping[str, int]
"""Number of devices along each mesh axis, by its name, in the mesh's order."""


def without_trailing_nones(entries: Iterable[Any]) -> Entries:
    """Return a spec without trailing Nones: jit would compile again for another spelling."""
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return tuple(kept)


def splitting_axes(entry: Any, mesh: MeshSizes) -> AxisEntry:
    """Return an entry without axes of size 1, which split nothing; the compiler omits them too."""
    names = tuple(axis for axis in entry_axes(entry) if mesh[axis] > 1)
    return names if len(names) > 1 else names[0] if names else None


def shard_count(axes: Iterable[str], mesh: MeshSizes) -> int:
    """Return into how many parts these mesh axes split a dimension."""
    return prod(mesh[axis] for axis in axes)


def shard_shape(
    shape: Sequence[int], entries: Sequence[AxisEntry], mesh: MeshSizes
) -> tuple[int, ...]:
    """Return the shape of one device's shard of a leaf; the mesh must divide the leaf evenly."""
    parts = [shard_count(entry_axes(entry), mesh) for entry in entries]
    parts += [1] * (len(shape) - len(parts))
    return tuple(length // count for length, count in zip(shape, parts, strict=True))


def mesh_text(mesh: MeshSizes) -> str:
    """Return a mesh as text, such as "dp=2, fsdp=4, tp=1, sp=1"."""
    return ", ".join(f"{name}={size}" for name, size in mesh.items())
