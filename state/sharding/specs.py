"""The parts of a PartitionSpec."""

from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

from cairn.state.placement import short

__all__ = ["short_spec"]


def short_spec(entries: Iterable[Any]) -> PartitionSpec:
    """Returns a spec without trailing Nones, as plans spell it: jit knows no two spellings."""
    return PartitionSpec(*short(entries))
