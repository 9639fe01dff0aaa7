"""Reads of TensorStore's that end: its arrays, whose reads are waited for with a limit. No JAX."""

from __future__ import annotations

from typing import Any

from cairn.storage.store import Progress, outcome

__all__ = ["LimitedRead", "LimitedReads"]


class LimitedReads:
    """An array of TensorStore's, indexed as it is."""

    def __init__(self, array: Any, progress: Progress) -> None:
        """Wraps an array.

        Args:
            array: open for reading.
            progress: of all reads that are made together.
        """
        self._array, self._progress = array, progress

    def __getitem__(self, index: Any) -> LimitedReads:
        """A part to read."""
        return LimitedReads(self._array[index], self._progress)

    def read(self, order: str = "C") -> LimitedRead:
        """Starts to read."""
        return LimitedRead(self._array.read(order=order), self._progress)


class LimitedRead:
    """What TensorStore has begun."""

    def __init__(self, future: Any, progress: Progress) -> None:
        """Of a future of TensorStore's, and of all that is read with it."""
        self._future, self._progress = future, progress

    def result(self) -> Any:
        """What it gave.

        Raises:
            TimeoutError: nothing was read for too long.
            ValueError, OSError: as TensorStore says it.
        """
        return outcome(self._future, self._progress)
