"""The parts of a PartitionSpec."""

from collections.abc import Iterable
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

__all__ = ["entry_axes", "short_spec", "splitting_axes"]


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that an entry of a spec names: one, several, or none."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def short_spec(entries: Iterable[Any]) -> PartitionSpec:
    """Returns a spec without trailing Nones, as plans spell it: jit knows no two spellings."""
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def splitting_axes(entry: Any, mesh: Mesh | AbstractMesh) -> str | tuple[str, ...] | None:
    """Returns an entry without axes of size 1, which split nothing, as the compiler writes it."""
    names = tuple(axis for axis in entry_axes(entry) if mesh.shape[axis] > 1)
    return names if len(names) > 1 else names[0] if names else None
