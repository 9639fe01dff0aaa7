"""PartitionSpecs in a unique form."""

from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

from cairn.interop.placement.specs import without_trailing_nones

__all__ = ["short_spec"]


def short_spec(entries: Iterable[Any]) -> PartitionSpec:
    """Return a spec without trailing Nones: jit would compile again for an equivalent spec."""
    return PartitionSpec(*without_trailing_nones(entries))
