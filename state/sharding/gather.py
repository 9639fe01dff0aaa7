"""Gathering of a sharded tree into host memory, one leaf at a time."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cairn.state.checkpointing.leaf_forms import is_key_dtype

__all__ = ["gather_leaf", "gather_tree"]


def gather_leaf(leaf: Any) -> Any:
    """Return a leaf in host memory: a NumPy array; typed PRNG keys as an array on a CPU device.

    In a job of several processes, all must call this for the same leaves in the same order. Each
    gets the whole leaf; its devices hold the whole leaf during the call.
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
    """Return the tree with every leaf in host memory.

    Leaves are gathered one after the other, so devices need memory for one whole leaf only. In a
    job of several processes, all must call this, and each gets the whole tree.
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [gather_leaf(leaf) for leaf in leaves])
