"""Copies of arrays to the host (staging), in waves that fit the granted memory.

A pure function groups what must be copied (from accelerators, and of NumPy arrays) into waves. The
caller of a save copies a wave, the writers write and free it, and only then the next wave is
copied: the caller waits until the last one is copied, and may donate from then on. If all fits
there is one wave; on GPUs the caller does not even wait for that: its copies to pinned memory are
dispatched, and the writers wait for them. Imports JAX. See ADR 0044 and 0051.
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
"""Divisor: this share of the granted memory is for uploads, if waves could use it all."""

HostBoxes = Mapping[str, tuple[HostBox, ...]]
"""Parts of an item's leaves, by path."""

CopiedBoxes = Mapping[str, tuple[HostBox | PinnedBox, ...]]
"""Parts of an item's leaves, by path, some still being copied."""


class BoxToCopy(NamedTuple):
    """Unit of copying to the host: this process's box of a device's shard.

    Attributes:
        item: its name.
        path: of the leaf.
        number: index among the leaf's boxes in this process.
        nbytes: bytes that arrive; those of the whole shard, if several processes divide it.
    """

    item: str
    path: str
    number: int
    nbytes: int


Wave = tuple[BoxToCopy, ...]


def boxes_to_copy(transfers: Mapping[str, Transfers], *, numpy: bool) -> list[BoxToCopy]:
    """Return all boxes that must be copied to the host, or on it.

    Args:
        transfers: of the items, by name, not started.
        numpy: include NumPy arrays.
    """
    return [
        BoxToCopy(name, path, number, nbytes)
        for name, of_item in transfers.items()
        for path, sizes in of_item.to_copy(numpy=numpy).items()
        for number, nbytes in enumerate(sizes)
    ]


def copier(transfers: Mapping[str, Transfers]) -> Callable[[Wave], dict[str, CopiedBoxes]]:
    """Return the function that copies a wave, for `Staging`; a wave's transfers run concurrently.

    Args:
        transfers: of the items, by name, not started.
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

    Every box is in one wave. No wave exceeds the budget, except one with a single larger box. The
    same boxes give the same waves, in any order.

    Args:
        boxes: to be copied.
        budget: bytes of a wave.
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
    """Return the bytes that a save's copies may take here if the user set no limit.

    Half of the host's free memory, divided by its processes; all of them must call this. Memory
    that XLA pinned for an earlier save never returns to the host, so that much is always usable.
    """
    return max(1, _pinned, free_memory() // 2 // _processes_on_this_host())


_pinned = 0
"""Minimum bytes that XLA has pinned for this process's saves."""


def record_pinned(nbytes: int) -> None:
    """Record the pinned memory that a save's copies use at once.

    Args:
        nbytes: of the copies of one save.
    """
    global _pinned
    _pinned = max(_pinned, nbytes)


@functools.cache
def _processes_on_this_host() -> int:
    host = socket.gethostname()
    return agreement.collect(host).count(host)


def pinned_budget(host_memory: int | None) -> int:
    """Return the bytes of pinned memory that a save's copies may take in this process.

    XLA's pool has a limit of its own, whatever the host has.

    Args:
        host_memory: bytes that copies may take; None: as `default_copy_bytes`.

    Source: `GetGpuHostAllocator` in XLA's `xla/pjrt/gpu/gpu_helpers.cc`.
    """
    text = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    pool = (int(text) if text.isdecimal() else 64) << 30
    return min(pool, default_copy_bytes() if host_memory is None else host_memory)


class MemoryShares(NamedTuple):
    """Division of the granted memory.

    Attributes:
        waves: bytes of a wave.
        uploads: bytes for uploads to an object store.
    """

    waves: int
    uploads: int


def divide_memory(host_memory: int, *, kept: int, staged: int, uploads: bool) -> MemoryShares:
    """Divide a save's memory; uploads get what no wave can use.

    Args:
        host_memory: bytes for everything.
        kept: bytes of it in kept buffers.
        staged: bytes of all that is copied in waves.
        uploads: the step goes to an object store.
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
            waves: from `plan_waves`.
            copied: copies a wave and returns its boxes on the host, by item and path.
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
        """Yield each wave's boxes of an item, once copied; for the one thread that writes it.

        A wave counts as written when the next is requested: by then the writer must have dropped
        it.

        Raises:
            BaseException: the error given to `end`; the other waves do not come.
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
        """Copy the other waves, each after the one before is written; blocks the caller of a save.

        Returns at once when the save ends, whatever its outcome.

        Args:
            timeout: seconds; None waits without a limit.

        Returns:
            False if not all was copied in time; then nothing more is.
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
        """Stop all waits: the save is over or abandoned.

        Args:
            error: raised in those that still request boxes.
        """
        with self._changed:
            self._over = True
            self._there = {}
            if error is not None and not isinstance(error, Exception):
                # An interrupt is for the caller; in a writer's thread it would end Orbax's loop.
                error = SaveError(f"the save was interrupted: {type(error).__name__}")
            self._error = self._error or error or SaveError("the save is over")
            self._changed.notify_all()


def _nothing(wave: Wave) -> Mapping[str, CopiedBoxes]:
    raise AssertionError(f"{len(wave)} boxes requested once all are copied")
