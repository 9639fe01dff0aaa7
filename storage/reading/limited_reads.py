"""Reads of TensorStore's that end: its arrays, whose reads are waited for with a limit. No JAX."""

from __future__ import annotations

from typing import Any

from cairn.storage.store import Progress, called, outcome

__all__ = ["LimitedRead", "LimitedReads"]


class LimitedReads:
    """An array of TensorStore's, indexed as it is."""

    def __init__(self, array: Any, progress: Progress, path: object) -> None:
        """Wraps an array.

        Args:
            array: open for reading.
            progress: of all reads that are made together.
            path: what is read, for those who listen to requests.
        """
        self._array, self._progress, self._path = array, progress, path

    def __getitem__(self, index: Any) -> LimitedReads:
        """A part to read."""
        return LimitedReads(self._array[index], self._progress, self._path)

    def read(self, order: str = "C") -> LimitedRead:
        """Starts to read."""
        return LimitedRead(self._array.read(order=order), self._progress, self._path)


class LimitedRead:
    """What TensorStore has begun."""

    def __init__(self, future: Any, progress: Progress, path: object) -> None:
        """Of a future of TensorStore's, all that is read with it, and what it is."""
        self._future, self._progress, self._path = future, progress, path

    def result(self) -> Any:
        """What it gave.

        Raises:
            TimeoutError: nothing was read for too long.
            ValueError, OSError: as TensorStore says it.
        """
        with called("read", self._path):
            return outcome(self._future, self._progress)
