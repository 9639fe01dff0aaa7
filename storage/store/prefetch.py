"""Run an iterator ahead of its consumer, in a thread, a bounded number of items."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Generic, TypeVar

__all__ = ["prefetched"]

T = TypeVar("T")


class _Channel(Generic[T]):
    """A bounded queue with two ends that can both be closed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._abandoned = False
        self._error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Add an item once there is room; False if nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or len(self._items) < self._size)
            if not self._abandoned:
                self._items.append(item)
                self._changed.notify_all()
            return not self._abandoned

    def end(self, error: BaseException | None = None) -> None:
        """No more items; `error` is raised to the consumer after the last."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """No more items are wanted."""
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
def prefetched(source: Generator[T, None, None], ahead: int) -> Iterator[Iterator[T]]:
    """The items of `source`, up to `ahead` of them made before they are asked for.

    An exception in `source` is raised to the consumer after the items before it. On leaving the
    context the thread has ended and the source is closed, whether or not all items were taken.
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
