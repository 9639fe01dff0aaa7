"""Statistics of tensors, kept by what they are of: what two steps share is read once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from cairn.storage.arrays import Statistics

MOST: Final = 4096
"""Answers that are kept; a kilobyte each."""


class KnownStatistics:
    """The answers that were asked for last. Safe for use by many threads."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Statistics] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, content: Hashable, read: Callable[[], Statistics]) -> Statistics:
        """Those of some content, which are read if they are not known.

        Args:
            content: Another for everything that has others.
            read: Finds them.
        """
        with self._lock:
            known = self._found.get(content)
        found = read() if known is None else known
        with self._lock:
            self._found[content] = found
            self._found.move_to_end(content)
            while len(self._found) > MOST:
                self._found.popitem(last=False)
        return found
