"""Growth of XLA's pinned memory before the first save: XLA pins at 2 GB/s. Imports JAX.

XLA keeps pinned memory in a pool until the process ends; copies to memory from this pool run at the
speed of the link between device and host. See ADR 0051.
"""

import logging
import threading
from collections.abc import Iterable
from typing import Final

import jax
import numpy as np

from cairn.state.checkpointing.leaf_forms import is_key_dtype
from cairn.state.checkpointing.saves.host_arrays import array_layout, is_in_host_memory, on_gpu
from cairn.state.checkpointing.saves.staging import record_pinned

__all__ = ["PinnedWarmup"]

logger = logging.getLogger("cairn.save")

_NAME: Final = "cairn-pin"


class PinnedWarmup:
    """Thread that makes XLA's pool of pinned memory grow; does nothing without a GPU."""

    def __init__(self, arrays: Iterable[jax.Array], budget: int) -> None:
        """Start the thread.

        Args:
            arrays: arrays of the shapes, dtypes and shardings that will be saved.
            budget: maximum bytes to pin.
        """
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=self._grow, args=(_copies(arrays), budget), name=_NAME
        )
        if on_gpu():
            self._thread.start()

    def end(self) -> None:
        """Stop and wait until the thread pins no more: a save needs the memory itself."""
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _grow(self, copies: list[tuple[jax.Device, int]], budget: int) -> None:
        pinned: list[jax.Array] = []
        for device, nbytes in copies:
            # Python's exit waits for this thread after the main thread has ended.
            if self._ends.is_set() or not threading.main_thread().is_alive():
                return
            if nbytes > budget:
                continue
            budget -= nbytes
            place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
            try:
                # Keep all allocations: XLA would reuse a freed one, and its pool would not grow.
                pinned.append(jax.block_until_ready(jax.device_put(np.empty(nbytes, "u1"), place)))
                record_pinned(sum(copy.nbytes for copy in pinned))
            except jax.errors.JaxRuntimeError as exc:
                logger.warning("no more pinned memory for saves: %s", exc)
                return


def _copies(arrays: Iterable[jax.Array]) -> list[tuple[jax.Device, int]]:
    """Return device and bytes of each copy that a save of these arrays makes, largest first."""
    copies = []
    for leaf in arrays:
        if leaf.size == 0 or is_in_host_memory(leaf):
            continue
        array = jax.random.key_data(leaf) if is_key_dtype(leaf.dtype) else leaf
        shards = array.addressable_shards
        copies += [
            (shards[box.shard].device, shards[box.shard].data.nbytes)
            for box in array_layout(array, columns=False).boxes
        ]
    return sorted(copies, key=lambda copy: -copy[1])
