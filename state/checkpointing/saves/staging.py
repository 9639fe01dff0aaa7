"""Copies of arrays to the host (staging), in waves that fit a limit of host memory.

`plan_waves` groups the arrays that must be copied into waves. The thread that called `save` copies
a wave, the writers write it and free its memory, then the next wave is copied. `save` returns once
the last wave is copied; the caller may donate the arrays from then on. If all arrays fit, there is
one wave. On GPUs the caller does not wait for the copies to pinned memory; the writers do. Imports
JAX. See ADR 0044 and 0051.
"""

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from cairn.state.checkpointing.processes import agreement
from cairn.state.checkpointing.saves.host_arrays import HostBox, PinnedBox, Transfers
from cairn.storage.errors import SaveError
from cairn.storage.store.bounds import free_memory

__all__ = [
    "BoxToCopy",
    "MemoryShares",
    "Staging",
    "boxes_to_copy",
    "copier",
    "default_copy_bytes",
    "divide_memory",
    "pinned_budget",
    "plan_waves",
    "record_pinned",
]

_OF_UPLOADS: Final = 4
"""Divisor: if the waves could use all memory, one part in this many is kept for uploads."""

HostBoxes = Mapping[str, tuple[HostBox, ...]]
"""Boxes of an item's leaves, by path."""

CopiedBoxes = Mapping[str, tuple[HostBox | PinnedBox, ...]]
"""Boxes of an item's leaves, by path; some may still be being copied to pinned memory."""


class BoxToCopy(NamedTuple):
    """Box that must be copied to the host.

    Attributes:
        item: the item's name.
        path: the leaf's path.
        number: number of the box among the leaf's boxes in this process.
        nbytes: host bytes that the copy needs: those of the whole device shard.
    """

    item: str
    path: str
    number: int
    nbytes: int


Wave = tuple[BoxToCopy, ...]


def boxes_to_copy(transfers: Mapping[str, Transfers], *, numpy: bool) -> list[BoxToCopy]:
    """Return all boxes that must be copied: from devices to the host, and of NumPy arrays.

    Args:
        transfers: the transfers of each item, by name, not started.
        numpy: whether NumPy arrays must be copied.
    """
    return [
        BoxToCopy(name, path, number, nbytes)
        for name, of_item in transfers.items()
        for path, sizes in of_item.to_copy(numpy=numpy).items()
        for number, nbytes in enumerate(sizes)
    ]


def copier(transfers: Mapping[str, Transfers]) -> Callable[[Wave], dict[str, CopiedBoxes]]:
    """Return a function that copies a wave, for `Staging`.

    All transfers of a wave run at the same time.

    Args:
        transfers: the transfers of each item, by name, not started.
    """

    def copied(wave: Wave) -> dict[str, CopiedBoxes]:
        by_item: dict[str, list[tuple[str, int]]] = {}
        for box in wave:
            by_item.setdefault(box.item, []).append((box.path, box.number))
        for name, boxes in by_item.items():
            transfers[name].start(boxes)
        copies: dict[str, CopiedBoxes] = {
            name: {path: tuple(done) for path, done in transfers[name].copied(boxes).items()}
            for name, boxes in by_item.items()
        }
        every = chain.from_iterable(chain.from_iterable(each.values()) for each in copies.values())
        record_pinned(sum(box.copy.nbytes for box in every if isinstance(box, PinnedBox)))
        return copies

    return copied


def plan_waves(boxes: Iterable[BoxToCopy], budget: int) -> tuple[Wave, ...]:
    """Group boxes into waves: largest first, each into the first wave that has room.

    No wave exceeds the budget, except a wave of a single box that does. The order of `boxes` does
    not matter.

    Args:
        boxes: the boxes to copy.
        budget: maximum bytes of a wave.
    """
    waves: list[list[BoxToCopy]] = []
    left: list[int] = []
    first = 0  # the waves before are full
    for box in sorted(boxes, key=lambda box: (-box.nbytes, box[:3])):
        at = next((n for n in range(first, len(left)) if left[n] >= box.nbytes), len(waves))
        if at == len(waves):
            waves.append([])
            left.append(budget)
        waves[at].append(box)
        left[at] -= box.nbytes
        while first < len(left) and left[first] <= 0:
            first += 1
    return tuple(map(tuple, waves))


def default_copy_bytes() -> int:
    """Return the bytes that a save's copies may take in this process if the user set no limit.

    That is half of the host's free memory, divided by the job's processes on this host; but at
    least what XLA has pinned for an earlier save, since it never frees that. All processes must
    call this.
    """
    return max(1, _pinned, free_memory() // 2 // _processes_on_this_host())


_pinned = 0
"""Minimum bytes that XLA has pinned for this process's saves."""


def record_pinned(nbytes: int) -> None:
    """Record that XLA has pinned at least this much memory.

    Args:
        nbytes: bytes of pinned copies that exist at the same time.
    """
    global _pinned
    _pinned = max(_pinned, nbytes)


@functools.cache
def _processes_on_this_host() -> int:
    host = socket.gethostname()
    return agreement.collect(host).count(host)


def pinned_budget(host_memory: int | None) -> int:
    """Return the bytes of pinned memory that a save's copies may take in this process.

    The limit of XLA's pool bounds it.

    Args:
        host_memory: maximum bytes of copies; None for `default_copy_bytes`.

    Source: `GetGpuHostAllocator` in XLA's `xla/pjrt/gpu/gpu_helpers.cc`.
    """
    text = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    pool = (int(text) if text.isdecimal() else 64) << 30
    return min(pool, default_copy_bytes() if host_memory is None else host_memory)


class MemoryShares(NamedTuple):
    """Division of a save's host memory between waves and uploads.

    Attributes:
        waves: maximum bytes of a wave.
        uploads: maximum bytes for uploads to an object store.
    """

    waves: int
    uploads: int


def divide_memory(host_memory: int, *, kept: int, staged: int, uploads: bool) -> MemoryShares:
    """Divide a save's host memory; uploads get the bytes that waves can't use.

    Args:
        host_memory: maximum bytes of the save.
        kept: bytes that kept buffers use.
        staged: bytes of all boxes that are copied in waves.
        uploads: whether the step goes to an object store.
    """
    left = max(1, host_memory - kept)
    waves = max(1, min(staged, left - left // _OF_UPLOADS)) if uploads else left
    return MemoryShares(waves, max(1, left - waves))


class Staging:
    """Waves of one save: one thread copies them, the item writers consume them.

    Attributes:
        waves: boxes of each wave.
    """

    def __init__(
        self,
        waves: Sequence[Wave],
        copied: Callable[[Wave], Mapping[str, CopiedBoxes]],
    ) -> None:
        """Copy the first wave.

        Args:
            waves: the waves that `plan_waves` returned.
            copied: function that copies a wave and returns its boxes, by item and path.
        """
        self.waves = tuple(waves)
        self._copied = copied
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._over = False
        self._at = 0
        self._there: dict[str, CopiedBoxes] = dict(copied(self.waves[0])) if waves else {}
        self._writing = set(self._there)

    def waves_of(self, item: str) -> Iterator[HostBoxes]:
        """Yield each wave's boxes of an item once they are copied. One thread per item calls this.

        The request for the next wave means that this one is written: the caller must then have
        dropped its references to it.

        Raises:
            BaseException: `end` was called; the error is the one that it was given.
        """
        for number, wave in enumerate(self.waves):
            if all(box.item != item for box in wave):
                continue
            yield {
                path: tuple(box.wait() if isinstance(box, PinnedBox) else box for box in boxes)
                for path, boxes in self._taken(item, number).items()
            }
            with self._changed:
                self._writing.discard(item)
                self._changed.notify_all()

    def _taken(self, item: str, number: int) -> CopiedBoxes:
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._at >= number)
            if self._error is not None:
                raise self._error
            return self._there.pop(item)

    def copy_rest(self, timeout: float | None = None) -> bool:
        """Copy the other waves, each after the one before is written.

        Returns early, with True, if the save ends before, whatever its outcome.

        Args:
            timeout: maximum seconds to wait; None for no limit.

        Returns:
            False if not all waves were copied in time; no more are copied then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            return self._copy_rest(deadline)
        finally:
            self._copied = _nothing  # drop the sources, so that their memory can be freed

    def _copy_rest(self, deadline: float | None) -> bool:
        for number, wave in enumerate(self.waves[1:], 1):
            with self._changed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                written = self._changed.wait_for(lambda: self._over or not self._writing, left)
                if self._over:
                    return True
                if not written:
                    return False
            there = self._copied(wave)
            with self._changed:
                self._there, self._at = dict(there), number
                self._writing = set(there)
                self._changed.notify_all()
            del there  # so that it is freed once written, before the next copy
        return True

    def end(self, error: BaseException | None) -> None:
        """End all waits, because the save has ended or was abandoned.

        Args:
            error: error to raise in threads that still request boxes; None for a general one.
        """
        with self._changed:
            self._over = True
            self._there = {}
            if error is not None and not isinstance(error, Exception):
                # An interrupt is raised in the caller only: in a writer it would end Orbax's loop.
                error = SaveError(f"the save was interrupted: {type(error).__name__}")
            self._error = self._error or error or SaveError("the save is over")
            self._changed.notify_all()


def _nothing(wave: Wave) -> Mapping[str, CopiedBoxes]:
    raise AssertionError(f"{len(wave)} boxes requested once all are copied")
