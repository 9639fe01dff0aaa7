"""Memory for the parts of leaves while they are read. Imports JAX.

CPU devices keep this memory as the leaf's. Other devices get a copy of it: leaves pass through one
window on their way there, whose memory is used again and again.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from cairn.storage.arrays import ALIGNMENT, Index, SmallArrays, aligned_empty
from cairn.storage.reading import HOST_BYTES

__all__ = ["HostMemory", "Slot"]


@dataclass(eq=False)
class Slot:
    """A stretch of the window, which a leaf has until its devices have the values.

    Attributes:
        start: its first byte.
        stop: after its last.
        value: what was made of it; None while it is being filled.
        free: nobody reads it any more.
    """

    start: int
    stop: int
    value: jax.Array | None = None
    free: bool = False


class HostMemory:
    """Memory for the leaves of one restore. For use by one thread."""

    def __init__(self, window: int = HOST_BYTES) -> None:
        """A window of so many bytes; none of it is touched before a leaf needs it."""
        self._small = SmallArrays()
        self._size = window
        self._window: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._slots: deque[Slot] = deque()

    def lasting(self, shape: Index, count: int, dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
        """Arrays, not initialised, that become the leaf's."""
        return [self._small.empty(shape, dtype) for _ in range(count)]

    def fits(self, shape: Index, count: int, dtype: np.dtype[Any]) -> bool:
        """Whether the window has room for such arrays; an empty one has room for anything."""
        return self._start(_padded(shape, dtype) * count) is not None

    def passing(
        self, shape: Index, count: int, dtype: np.dtype[Any]
    ) -> tuple[list[np.ndarray[Any, Any]], Slot]:
        """Arrays that fit into the window, not initialised, and their slot there.

        Those that are larger than all of the window have memory of their own in its place.
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
        """Wait until the devices have a leaf that is on its way, and free its slot.

        Returns:
            Whether there was one.
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
        """Wait for all that are on their way."""
        while self.wait():
            pass

    def _start(self, nbytes: int) -> int | None:
        """Where so many bytes fit; slots lie one after another, and begin anew at the end."""
        if not self._slots:
            return 0
        first, last = self._slots[0], self._slots[-1]
        if last.start < first.start:
            return last.stop if last.stop + nbytes <= first.start else None
        if last.stop + nbytes <= self._size:
            return last.stop
        return 0 if nbytes <= first.start else None


def _padded(shape: Index, dtype: np.dtype[Any]) -> int:
    """Bytes from the start of an array to that of the next."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
