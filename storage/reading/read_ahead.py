"""Asks a local disk for what is read next, while the processor works on what was read.

Only asks: nothing is held here, nothing waits, and what is read is checked when it is read. The
operating system reads into its cache, posix_fadvise(2).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from cairn.storage.store import goes_direct

__all__ = ["AHEAD_BYTES", "ReadAhead", "ask", "asked_ahead"]

AHEAD_BYTES: Final = 64 << 20
"""Asked for before they are read: enough that a disk does not wait for the processor."""

T = TypeVar("T")


class ReadAhead:
    """Leaves that are read one after another. Safe for use by many threads."""

    def __init__(
        self, paths: Iterable[str], nbytes: Callable[[str], int], begin: Callable[[str], None]
    ) -> None:
        """See `starts`.

        Args:
            paths: the leaves, in the order in which they will be read.
            nbytes: of a leaf.
            begin: asks the disk for a leaf.
        """
        self._order = list(dict.fromkeys(paths))
        self._position = {path: number for number, path in enumerate(self._order)}
        self._nbytes, self._begin = nbytes, begin
        self._asked: set[str] = set()
        self._lock = threading.Lock()

    def starts(self, path: str) -> None:
        """A leaf is about to be read: asks for those behind it. Larger ones ask for themselves."""
        for later in self._to_ask(path):
            self._begin(later)

    def _to_ask(self, path: str) -> list[str]:
        with self._lock:
            self._asked.add(path)
            found: list[str] = []
            left = AHEAD_BYTES
            start = self._position.get(path, len(self._order)) + 1
            for later in self._order[start : start + AHEAD_BYTES // 4096]:
                left -= self._nbytes(later)
                if left < 0:
                    break
                if later not in self._asked:
                    found.append(later)
            self._asked.update(found)
        return found


def asked_ahead(
    parts: Iterable[T], nbytes: Callable[[T], int], begin: Callable[[T], None]
) -> Iterator[T]:
    """The same parts, each asked of the disk `AHEAD_BYTES` before its turn."""
    waiting: deque[T] = deque()
    held = 0
    for part in parts:
        begin(part)
        waiting.append(part)
        held += nbytes(part)
        while held > AHEAD_BYTES:
            held -= nbytes(waiting[0])
            yield waiting.popleft()
    yield from waiting


def ask(file: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Ask for bytes of an open file, as (offset, length), where the system knows such a call.

    What is read past the page cache is not asked for: it would go there.
    """
    if hasattr(os, "posix_fadvise"):
        for offset, length in ranges:
            if not goes_direct(length):
                os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)
