"""Processes that hold each slice of an array."""

import functools
from collections.abc import Mapping
from typing import Any

import jax

from cairn.storage.arrays.box_buffers import Index, origin_of

__all__ = ["holders_of_slices"]


@functools.lru_cache(maxsize=4096)
def holders_of_slices(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> dict[Index, tuple[int, ...]]:
    """Return the sorted processes that hold each slice, by the index of the slice's first element.

    Args:
        sharding: the array's sharding.
        shape: the array's shape.
    """
    slices: dict[Index, set[int]] = {}
    places: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in places.items():
        slices.setdefault(origin_of(index), set()).add(device.process_index)
    return {origin: tuple(sorted(holders)) for origin, holders in sorted(slices.items())}
