"""Read-ahead: a local disk reads the next data while the processor works on the present data.

This only passes hints to the operating system, by posix_fadvise(2), which then reads into its page
cache. No call waits, and data is checked later, when it is read.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from cairn.storage.store.disk.direct_io import should_use_direct_io

__all__ = ["AHEAD_BYTES", "ReadAhead", "ask", "asked_ahead"]

AHEAD_BYTES: Final = 64 << 20
"""Number of bytes to read ahead: enough that the disk does not wait for the processor."""

T = TypeVar("T")


class ReadAhead:
    """Read-ahead of leaves that are read one after another. Safe for use by many threads."""

    def __init__(
        self, paths: Iterable[str], nbytes: Callable[[str], int], begin: Callable[[str], None]
    ) -> None:
        """Create the read-ahead; nothing is read until `starts`.

        Args:
            paths: the leaves, in the order in which they will be read.
            nbytes: returns the size of a leaf in bytes.
            begin: has the disk read a leaf ahead.
        """
        self._order = list(dict.fromkeys(paths))
        self._position = {path: number for number, path in enumerate(self._order)}
        self._nbytes, self._begin = nbytes, begin
        self._asked: set[str] = set()
        self._lock = threading.Lock()

    def starts(self, path: str) -> None:
        """Have the disk read ahead the leaves after `path`, which is about to be read.

        Large leaves are left out: their own reads are read ahead part by part.
        """
        for later in self._to_ask(path):
            self._begin(later)

    def _to_ask(self, path: str) -> list[str]:
        with self._lock:
            self._asked.add(path)
            paths: list[str] = []
            left = AHEAD_BYTES
            start = self._position.get(path, len(self._order)) + 1
            # The slice bounds the scan where leaves are tiny.
            for later in self._order[start : start + AHEAD_BYTES // 4096]:
                left -= self._nbytes(later)
                if left < 0:
                    break
                if later not in self._asked:
                    paths.append(later)
            self._asked.update(paths)
        return paths


def asked_ahead(
    parts: Iterable[T], nbytes: Callable[[T], int], begin: Callable[[T], None]
) -> Iterator[T]:
    """Yield the parts unchanged; before each, have the disk read `AHEAD_BYTES` of later parts."""
    waiting: deque[T] = deque()
    pending_bytes = 0
    for part in parts:
        begin(part)
        waiting.append(part)
        pending_bytes += nbytes(part)
        while pending_bytes > AHEAD_BYTES:
            pending_bytes -= nbytes(waiting[0])
            yield waiting.popleft()
    yield from waiting


def ask(file: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Have the system read (offset, length) ranges of an open file ahead, if it supports that.

    Ranges that will be read past the page cache are left out: read-ahead would fill the cache.
    """
    if hasattr(os, "posix_fadvise"):
        for offset, length in ranges:
            if not should_use_direct_io(length):
                os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)
