"""Arrays come to the host in waves, each as large as memory is granted.

What must be copied (from accelerators, and of NumPy arrays) is cut into waves by a pure function.
The caller of a save copies a wave, the writers write it and let go of it, and only then comes the
next: so the caller waits until the last one is copied, and may donate from then on. Where all fits
there is one wave, and on GPUs nobody waits for the last: its copies to pinned memory are
dispatched, and its writers wait for them. Imports JAX. See ADR 0044 and 0051.
"""

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from cairn.storage.errors import SaveError
from cairn.storage.store import free_memory
from cairn.storage.training import processes
from cairn.storage.training.saving.held_arrays import HeldPart, PinnedPart, Transfers

__all__ = [
    "Granted",
    "PartToStage",
    "StagedItem",
    "Staging",
    "copier",
    "granted",
    "memory_unasked",
    "note_pinned",
    "parts_to_stage",
    "pinned_budget",
    "planned_waves",
]

_OF_UPLOADS: Final = 4
"""One part in so many of what is granted is kept for uploads, if waves could use it all."""

ItemParts = Mapping[str, tuple[HeldPart, ...]]
"""Of an item, by path."""

CopiedParts = Mapping[str, tuple[HeldPart | PinnedPart, ...]]
"""The same, some of them still on their way."""


class PartToStage(NamedTuple):
    """What is copied to the host at once: this process's part of a device's shard.

    Attributes:
        item: its name.
        path: of the leaf.
        number: which of the leaf's parts in this process.
        nbytes: bytes that arrive; those of the whole shard, if several processes divide it.
    """

    item: str
    path: str
    number: int
    nbytes: int


Wave = tuple[PartToStage, ...]


def parts_to_stage(transfers: Mapping[str, Transfers], *, numpy: bool) -> list[PartToStage]:
    """What is copied to the host, or on it.

    Args:
        transfers: of the items, by name, not started.
        numpy: NumPy arrays too.
    """
    return [
        PartToStage(name, path, number, nbytes)
        for name, one in transfers.items()
        for path, sizes in one.to_copy(numpy=numpy).items()
        for number, nbytes in enumerate(sizes)
    ]


def copier(transfers: Mapping[str, Transfers]) -> Callable[[Wave], dict[str, CopiedParts]]:
    """What copies a wave, as `Staging` has it; all transfers of a wave run at once.

    Args:
        transfers: of the items, by name, not started.
    """

    def copied(wave: Wave) -> dict[str, CopiedParts]:
        wanted: dict[str, list[tuple[str, int]]] = {}
        for part in wave:
            wanted.setdefault(part.item, []).append((part.path, part.number))
        for name, parts in wanted.items():
            transfers[name].start(parts)
        made: dict[str, CopiedParts] = {
            name: {path: tuple(found) for path, found in transfers[name].copied(parts).items()}
            for name, parts in wanted.items()
        }
        _note_pinned_of(made)
        return made

    return copied


def _note_pinned_of(wave: Mapping[str, CopiedParts]) -> None:
    parts = chain.from_iterable(chain.from_iterable(one.values()) for one in wave.values())
    note_pinned(sum(part.copy.nbytes for part in parts if isinstance(part, PinnedPart)))


def planned_waves(parts: Iterable[PartToStage], budget: int) -> tuple[Wave, ...]:
    """The waves in which parts are copied: the largest first, each in the first that has room.

    Every part is in one wave. None has more bytes than the budget, but for one of a single part
    that has more by itself. The same parts give the same waves, in whatever order they come.

    Args:
        parts: what is to be copied.
        budget: bytes of a wave.
    """
    waves: list[list[PartToStage]] = []
    left: list[int] = []
    first = 0  # those before are full
    for part in sorted(parts, key=lambda one: (-one.nbytes, one[:3])):
        at = next((n for n in range(first, len(left)) if left[n] >= part.nbytes), len(waves))
        if at == len(waves):
            waves.append([])
            left.append(budget)
        waves[at].append(part)
        left[at] -= part.nbytes
        while first < len(left) and left[first] <= 0:
            first += 1
    return tuple(map(tuple, waves))


def memory_unasked() -> int:
    """Bytes that a save's copies may take in this process where nobody has said how many.

    Half of what is free on this host, divided by its processes; all of them must call this. What
    XLA has pinned for a save before is never given back, so it can be taken again.
    """
    return max(1, _pinned, free_memory() // 2 // _processes_on_this_host())


_pinned = 0
"""Bytes that XLA has pinned for saves of this process, at least."""


def note_pinned(nbytes: int) -> None:
    """So many bytes of pinned memory are taken at the same time.

    Args:
        nbytes: of the copies of one save.
    """
    global _pinned
    _pinned = max(_pinned, nbytes)


@functools.cache
def _processes_on_this_host() -> int:
    host = socket.gethostname()
    return processes.collect(host).count(host)


def pinned_budget(host_memory: int | None) -> int:
    """Bytes of pinned memory that a save's copies may take in this process.

    XLA's pool of it has a limit of its own, whatever the host has.

    Args:
        host_memory: bytes that copies may take; None: as `memory_unasked`.

    Source: `GetGpuHostAllocator` in XLA's `xla/pjrt/gpu/gpu_helpers.cc`.
    """
    text = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    pool = (int(text) if text.isdecimal() else 64) << 30
    return min(pool, memory_unasked() if host_memory is None else host_memory)


class Granted(NamedTuple):
    """What of the granted memory is for what.

    Attributes:
        waves: bytes of a wave.
        uploads: bytes of what is on its way to an object store.
    """

    waves: int
    uploads: int


def granted(host_memory: int, *, kept: int, staged: int, uploads: bool) -> Granted:
    """How the memory that a save may take is divided: uploads have what no wave can use.

    Args:
        host_memory: bytes that all may take.
        kept: bytes of it that kept buffers have.
        staged: bytes of all that is to be copied in waves.
        uploads: whether the step goes to an object store.
    """
    left = max(1, host_memory - kept)
    waves = max(1, min(staged, left - left // _OF_UPLOADS)) if uploads else left
    return Granted(waves, max(1, left - waves))


class Staging:
    """The waves of one save: one thread copies them, those that write the items take them.

    Attributes:
        waves: what is copied when.
    """

    def __init__(
        self,
        waves: Sequence[Wave],
        copied: Callable[[Wave], Mapping[str, CopiedParts]],
    ) -> None:
        """Copy the first wave.

        Args:
            waves: as `planned_waves` gives them.
            copied: copies a wave: its parts on the host, by item and path.
        """
        self.waves = tuple(waves)
        self._copied = copied
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._over = False
        self._at = 0
        self._there: dict[str, CopiedParts] = dict(copied(self.waves[0])) if waves else {}
        self._writing = set(self._there)

    def parts_of(self, item: str) -> Iterator[ItemParts]:
        """What each wave has of an item, once it is there; taken by the one thread that writes it.

        A wave counts as written when the next is asked for: nothing of it may be held then.

        Raises:
            BaseException: what `end` was given; the other waves do not come.
        """
        for number, wave in enumerate(self.waves):
            if all(part.item != item for part in wave):
                continue
            yield {
                path: tuple(part.held() if isinstance(part, PinnedPart) else part for part in parts)
                for path, parts in self._taken(item, number).items()
            }
            with self._changed:
                self._writing.discard(item)
                self._changed.notify_all()

    def _taken(self, item: str, number: int) -> CopiedParts:
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._at >= number)
            if self._error is not None:
                raise self._error
            return self._there.pop(item)

    def copy_rest(self, timeout: float | None = None) -> bool:
        """Copy the other waves, each once the one before is written; the caller of a save waits.

        Returns at once when the save ends, however it does.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Returns:
            False if not all was copied in time; then nothing more is.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            return self._copy_rest(deadline)
        finally:
            self._copied = _nothing  # what was copied from may be given back

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
            del there  # once it is written nobody holds it while the next is copied
        return True

    def end(self, error: BaseException | None) -> None:
        """The save is over, or is given up: nobody waits any more.

        Args:
            error: what those are to raise who want more of it.
        """
        with self._changed:
            self._over = True
            self._there = {}
            if error is not None and not isinstance(error, Exception):
                # It is the caller's: in a writer's thread it would end the loop that awaits it.
                error = SaveError(f"the save was interrupted: {type(error).__name__}")
            self._error = self._error or error or SaveError("the save is over")
            self._changed.notify_all()


def _nothing(wave: Wave) -> Mapping[str, CopiedParts]:
    raise AssertionError(f"{len(wave)} parts asked for once all are copied")


class StagedItem(NamedTuple):
    """What one item gets of the waves.

    Attributes:
        staging: of the save.
        item: its name.
    """

    staging: Staging
    item: str

    def waves(self) -> Iterator[ItemParts]:
        """As `Staging.parts_of`."""
        return self.staging.parts_of(self.item)
