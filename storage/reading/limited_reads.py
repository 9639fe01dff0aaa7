"""TensorStore arrays whose reads time out instead of waiting without limit."""

from __future__ import annotations

from typing import Any

from cairn.storage.store.deadlines import Progress, wait_for
from cairn.storage.store.requests import timed_request

__all__ = ["LimitedRead", "LimitedReads"]


class LimitedReads:
    """TensorStore array whose reads have a time limit, indexed as the array is."""

    def __init__(self, array: Any, progress: Progress, path: object) -> None:
        """Wrap a TensorStore array.

        Args:
            array: the array, open for reading.
            progress: progress that all reads share which are made together.
            path: the leaf's address, for listeners to requests.
        """
        self._array, self._progress, self._path = array, progress, path

    def __getitem__(self, index: Any) -> LimitedReads:
        """Return a part of the array, to be read."""
        return LimitedReads(self._array[index], self._progress, self._path)

    def read(self, order: str = "C") -> LimitedRead:
        """Start the read, and return the operation."""
        return LimitedRead(self._array.read(order=order), self._progress, self._path)


class LimitedRead:
    """Operation that TensorStore has begun."""

    def __init__(self, future: Any, progress: Progress, path: object) -> None:
        """Wrap a TensorStore future, with the progress of all reads made with it and its path."""
        self._future, self._progress, self._path = future, progress, path

    def result(self) -> Any:
        """Wait for the operation, and return its result.

        Raises:
            TimeoutError: nothing was read for too long.
            ValueError, OSError: TensorStore's own errors.
        """
        with timed_request("read", self._path):
            return wait_for(self._future, self._progress)
