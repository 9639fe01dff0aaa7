"""Transfer of arrays to shardings, on a mesh of one process or of many."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cairn.state.checkpointing.leaf_forms import is_key_dtype
from cairn.state.checkpointing.processes import agreement
from cairn.state.errors import ShardingError

__all__ = ["put_leaf", "put_tree"]


def put_leaf(leaf: Any, place: Any) -> Any:
    """Return a leaf with a sharding, on its devices.

    If the sharding has devices of several processes, and each process has the whole leaf, each
    transfers only the shards of its own devices.

    Args:
        leaf: an array; in a job of several processes, equal on all of them.
        place: the sharding.
    """
    if not _is_spread(leaf, place):
        return jax.device_put(leaf, place)
    if is_key_dtype(leaf.dtype):
        data = put_leaf(jax.random.key_data(leaf), place)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    whole = np.asarray(leaf)

    def part(index: Any) -> np.ndarray[Any, Any]:
        # A copy: JAX may keep the memory, and its source may be donated or change.
        return np.array(whole[index], order="C")

    return jax.make_array_from_callback(whole.shape, place, part, dtype=whole.dtype)


def put_tree(tree: Any, places: Any) -> Any:
    """Return a tree with its leaves on the devices of shardings.

    In a job of several processes all must call this.

    Args:
        tree: tree of arrays.
        places: the tree with a sharding in place of each leaf.

    Raises:
        ShardingError: processes have different values of a leaf; raised on every process.
    """
    leaves, structure = jax.tree.flatten(tree)
    shardings = jax.tree.leaves(places)
    spread = [
        leaf for leaf, place in zip(leaves, shardings, strict=True) if _is_spread(leaf, place)
    ]
    if not spread:
        return jax.device_put(tree, places)
    # `jax.device_put` would compare them by sending every leaf of every process to all others.
    agreement.all_or_none(
        _checksums, spread, same=lambda checksums: {"values": checksums}, error=ShardingError
    )
    placed = [put_leaf(leaf, place) for leaf, place in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(structure, placed)


def _is_spread(leaf: Any, place: Any) -> bool:
    """Return whether each process has the whole leaf, and the sharding has devices of several."""
    if jax.process_count() == 1 or isinstance(leaf, jax.core.Tracer):
        return False
    if getattr(place, "is_fully_addressable", True):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _checksums(leaves: Sequence[Any]) -> list[int]:
    checksums = []
    for leaf in leaves:
        whole = np.asarray(jax.random.key_data(leaf) if is_key_dtype(leaf.dtype) else leaf)
        octets: Any = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
        checksums.append(zlib.crc32(octets))
    return checksums
