"""Bringing a sharded tree to host memory, one leaf at a time."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cairn.storage.training import is_key_dtype

__all__ = ["gather_leaf", "gather_tree"]


def gather_leaf(leaf: Any) -> Any:
    """Returns a leaf in host memory: a NumPy array, or for typed PRNG keys an array on one CPU.

    With several processes all must call this, for the same leaves in the same order; each of them
    gets the whole leaf, and its devices hold it whole for that moment.
    """
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_key_dtype(leaf.dtype):
        data = gather_leaf(jax.random.key_data(leaf))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def gather_tree(tree: Any) -> Any:
    """Returns the tree with every leaf in host memory.

    Leaves go one after the other, so that besides the result at most one leaf is in flight. With
    several processes all must call this, and each holds the whole tree in the end.
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [gather_leaf(leaf) for leaf in leaves])
