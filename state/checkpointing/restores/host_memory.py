"""Host memory for leaves while they are read. Imports JAX.

Arrays on CPU devices use the memory that was read into. For other devices, leaves are read into a
window of reusable memory and copied from there.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from cairn.storage.arrays.box_buffers import ALIGNMENT, Index, SmallArrays, aligned_empty
from cairn.storage.reading.leaf_reads import HOST_BYTES

__all__ = ["HostMemory", "Slot"]


@dataclass(eq=False)
class Slot:
    """Range of the window that a leaf occupies until its devices have the values.

    Attributes:
        start: first byte of the range.
        stop: the byte after the last.
        value: the array that is being copied from it to devices; None before and after that.
        free: True once the copy is complete.
    """

    start: int
    stop: int
    value: jax.Array | None = None
    free: bool = False


class HostMemory:
    """Host memory for the leaves of one restore. Not thread-safe."""

    def __init__(self, window: int = HOST_BYTES) -> None:
        """Set the window's size in bytes; its memory is allocated on first use."""
        self._small = SmallArrays()
        self._size = window
        self._window: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._slots: deque[Slot] = deque()

    def lasting(self, shape: Index, count: int, dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
        """Return `count` uninitialised arrays outside the window; the leaf may keep the memory."""
        return [self._small.empty(shape, dtype) for _ in range(count)]

    def fits(self, shape: Index, count: int, dtype: np.dtype[Any]) -> bool:
        """Return True if the window has room for `count` such arrays; True if it is empty."""
        return self._start(_padded(shape, dtype) * count) is not None

    def passing(
        self, shape: Index, count: int, dtype: np.dtype[Any]
    ) -> tuple[list[np.ndarray[Any, Any]], Slot]:
        """Return `count` uninitialised arrays in the window, and their slot; `fits` must be True.

        Arrays larger than the whole window get new memory, and the window's is freed.
        """
        each = _padded(shape, dtype)
        start = self._start(each * count)
        assert start is not None
        if each * count > self._size:
            self._window = None
            self._slots.append(slot := Slot(0, self._size))
            return aligned_empty([shape] * count, dtype), slot
        if self._window is None:
            (self._window,) = aligned_empty([(self._size,)], np.dtype(np.uint8))
        self._slots.append(slot := Slot(start, start + each * count))
        size = math.prod(shape) * dtype.itemsize
        parts = [self._window[at : at + size] for at in range(slot.start, slot.stop, each)]
        return [part.view(dtype).reshape(shape) for part in parts], slot

    def wait(self) -> bool:
        """Wait until the oldest leaf that is being copied is on its devices, and free its slot.

        Returns:
            False if no leaf is being copied.
        """
        sent = next((slot for slot in self._slots if slot.value is not None), None)
        if sent is None:
            return False
        jax.block_until_ready(sent.value)
        sent.value, sent.free = None, True
        while self._slots and self._slots[0].free:
            self._slots.popleft()
        return True

    def drain(self) -> None:
        """Wait until all leaves that are being copied are on their devices."""
        while self.wait():
            pass

    def _start(self, nbytes: int) -> int | None:
        """Return the start of a free range of the ring buffer; None if there is no room."""
        if not self._slots:
            return 0
        first, last = self._slots[0], self._slots[-1]
        if last.start < first.start:
            return last.stop if last.stop + nbytes <= first.start else None
        if last.stop + nbytes <= self._size:
            return last.stop
        return 0 if nbytes <= first.start else None


def _padded(shape: Index, dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array, rounded up to the alignment of the next one."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
