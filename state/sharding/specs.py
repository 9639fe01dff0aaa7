"""Parts of a PartitionSpec."""

from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

from cairn.interop.placement.specs import without_trailing_nones

__all__ = ["short_spec"]


def short_spec(entries: Iterable[Any]) -> PartitionSpec:
    """Return a spec without trailing Nones, as plans write it, since jit tells spellings apart."""
    return PartitionSpec(*without_trailing_nones(entries))
