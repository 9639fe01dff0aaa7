"""Iterator that runs a bounded number of items ahead of its consumer, in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Generic, TypeVar

__all__ = ["prefetch"]

T = TypeVar("T")


class _Channel(Generic[T]):
    """Bounded queue that either end can close."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._abandoned = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Add an item once there is room; return False if the consumer has left."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or len(self._items) < self._size)
            if not self._abandoned:
                self._items.append(item)
                self._changed.notify_all()
            return not self._abandoned

    def end(self, error: BaseException | None = None) -> None:
        """Mark the end; after the last item, `error` is raised for the consumer."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Drop all items, and refuse further ones: the consumer has left."""
        with self._changed:
            self._abandoned = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or bool(self._items))
                if not self._items:
                    if self._error is not None:
                        raise self._error
                    return
                item = self._items.popleft()
                self._changed.notify_all()
            yield item
            del item


@contextmanager
def prefetch(source: Generator[T, None, None], ahead: int) -> Iterator[Iterator[T]]:
    """Yield an iterator over `source` that makes up to `ahead` items in advance.

    The consumer gets an exception of `source` after the items before it. When the context ends,
    the thread has ended and the source is closed, even if the consumer left items.
    """
    channel: _Channel[T] = _Channel(max(1, ahead))

    def work() -> None:
        try:
            with closing(source):
                for item in source:
                    if not channel.put(item):
                        break
                    del item
        except BaseException as exc:
            channel.end(exc)
        else:
            channel.end()

    thread = threading.Thread(target=work, name="cairn-prefetch", daemon=True)
    thread.start()
    try:
        yield iter(channel)
    finally:
        channel.abandon()
        thread.join()
