"""Host memory for copies of arrays, kept from one save to the next. See ADR 0039."""

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.storage.errors import PolicyError

__all__ = ["MIN_COPIED_BYTES", "HostBuffers", "Places", "copy_all", "places"]

MIN_COPIED_BYTES: Final = 64 << 10
"""Minimum bytes of a JAX array that is copied into buffers; smaller arrays are kept as views. XLA
copies these quickly if it must, and copying many of them here would take longer than views."""

_ALIGNMENT: Final = 64
"""Alignment of arrays in bytes, so that no two share a cache line."""

_BATCH_BYTES: Final = 8 << 20
"""Approximate bytes that a copying thread copies per task."""

_THREADS: Final = max(1, min(8, os.cpu_count() or 1))

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Array = np.ndarray[Any, np.dtype[Any]]


class Places(NamedTuple):
    """Offsets of arrays in one allocation.

    Attributes:
        offsets: offset of each array, in bytes.
        nbytes: bytes of the whole allocation.
    """

    offsets: tuple[int, ...]
    nbytes: int


def places(sizes: Iterable[int]) -> Places:
    """Return aligned, consecutive offsets for arrays of these sizes in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Places(tuple(offsets), end)


class HostBuffers:
    """Memory for the copies of one save, which the next save reuses.

    Memory that is still referenced is never overwritten. Not thread-safe.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Start empty; the first save allocates the memory.

        Args:
            limit: maximum bytes; None for no limit.
        """
        self.limit = limit
        self._pages: mmap.mmap | None = None
        self._last: weakref.ref[Array] | None = None
        self._left: list[tuple[weakref.ref[Array], int]] = []
        _all.add(self)

    @classmethod
    def from_options(cls, reuse_buffers: Any, host_memory: Any) -> "HostBuffers | None":
        """Return buffers for these options of a checkpointer; None if `reuse_buffers` is False.

        Raises:
            PolicyError: `reuse_buffers` is no bool, or `host_memory` no number of bytes above 0.
        """
        problems = []
        if not isinstance(reuse_buffers, bool | np.bool_):
            problems.append(f"reuse_buffers is {reuse_buffers!r}, expected True or False")
        if host_memory is not None and (type(host_memory) is not int or host_memory < 1):
            problems.append(f"host_memory is {host_memory!r}, expected bytes above 0 or None")
        if problems:
            raise PolicyError(
                "saves can't use memory so",
                path="reuse_buffers, host_memory",
                expected="True or False, and the most bytes that copies may take, or None",
                found="; ".join(problems),
                next_step="Correct these, or leave them out.",
            )
        return cls(host_memory) if reuse_buffers else None

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, including older memory that a save still reads."""
        return (0 if self._pages is None else len(self._pages)) + self._left_bytes()

    def check(self, nbytes: int) -> None:
        """Check that a save's copies fit into the limit.

        Args:
            nbytes: bytes that the save must copy.

        Raises:
            PolicyError: they exceed the limit, together with memory that a save still reads.
        """
        self._leave_what_is_read()
        left = self._left_bytes()
        if self.limit is None or nbytes + left <= self.limit:
            return
        still = f", and {left} that an earlier save still reads" if left else ""
        raise PolicyError(
            "the arrays do not fit into the memory that their copies may take",
            path="host_memory",
            expected=f"at most {self.limit} bytes in this process",
            found=f"{nbytes} bytes to copy{still}",
            next_step="Give a larger host_memory, or save without reuse_buffers, which copies "
            "nothing that is not donated.",
        )

    def copies(self, arrays: Sequence[Array]) -> list[Array]:
        """Return read-only copies of these arrays, in C order.

        The next call reuses their memory; if one of the copies is still referenced then, it
        allocates new memory instead.

        Raises:
            PolicyError: the copies exceed the limit, or the machine's memory.
        """
        offsets, nbytes = places(array.nbytes for array in arrays)
        self.check(nbytes)
        if not nbytes:
            return [array.copy() for array in arrays]
        if self._pages is None or len(self._pages) < nbytes:
            self._pages = None  # freed before the new allocation, so that both never exist at once
            self._pages = _mapped(nbytes)
        # All views keep this array alive: a dead weak reference means that there are none.
        root = np.frombuffer(self._pages, np.uint8)
        self._last = weakref.ref(root)
        copies = [
            root[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for start, array in zip(offsets, arrays, strict=True)
        ]
        copy_all(list(zip(copies, arrays, strict=True)))
        for copy in copies:
            copy.setflags(write=False)
        return copies

    def forget(self) -> None:
        """Free the memory; if a save still reads it, it is freed once that save ends."""
        self._leave_what_is_read()
        self._pages = self._last = None

    def _leave_what_is_read(self) -> None:
        """Stop using memory that is still referenced; its bytes count until it is freed."""
        if self._pages is not None and self._last is not None and self._last() is not None:
            self._left.append((self._last, len(self._pages)))
            self._pages = self._last = None

    def _left_bytes(self) -> int:
        self._left = [memory for memory in self._left if memory[0]() is not None]
        return sum(nbytes for _, nbytes in self._left)


_all: "weakref.WeakSet[HostBuffers]" = weakref.WeakSet()
_of_the_parent: list[Array] = []
"""References that keep a forked child from unmapping memory that only the parent has mapped; the
child may have mapped something else at that address."""


def _forget_all() -> None:
    """Drop all buffers in a forked child, where their memory is not mapped."""
    for buffers in list(_all):
        buffers.forget()
        _of_the_parent.extend(root for ref, _ in buffers._left if (root := ref()) is not None)


os.register_at_fork(after_in_child=_forget_all)


def _mapped(nbytes: int) -> mmap.mmap:
    """Return new memory in ordinary pages (ADR 11), which a forked child does not inherit.

    Raises:
        PolicyError: the machine has not enough memory.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError) as exc:
        raise PolicyError(
            "the memory for copies of the arrays can't be had",
            path="reuse_buffers",
            expected=f"{nbytes} bytes of memory",
            found=str(exc),
            next_step="Save without reuse_buffers, or on a machine with more memory.",
        ) from exc
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)
    return pages


def copy_all(pairs: Sequence[tuple[Array, Array]]) -> None:
    """Copy arrays, in several threads if there is much to copy.

    Args:
        pairs: pairs of an array to write to and an array to read from.
    """
    batches = list(_batches(pairs))
    threads = min(_THREADS, len(batches))
    if threads < 2:
        for batch in batches:
            _copy(batch)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="cairn-copy") as pool:
        for done in [pool.submit(_copy, batch) for batch in batches]:
            done.result()


def _batches(pairs: Iterable[tuple[Array, Array]]) -> Iterator[list[tuple[Array, Array]]]:
    """Yield the pairs in batches of about `_BATCH_BYTES`; large contiguous arrays are divided."""
    batch: list[tuple[Array, Array]] = []
    size = 0
    for into, source in pairs:
        for piece in _pieces(into, source):
            batch.append(piece)
            size += piece[0].nbytes
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(into: Array, source: Array) -> Iterator[tuple[Array, Array]]:
    if not source.flags.c_contiguous:
        # NumPy copies ml_dtypes element by element; as integers they copy at full speed.
        kind = _UNSIGNED.get(source.itemsize, source.dtype)
        yield into.view(kind), source.view(kind)
        return
    octets, sources = into.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8)
    for start in range(0, len(octets), _BATCH_BYTES):
        end = start + _BATCH_BYTES
        yield octets[start:end], sources[start:end]


def _copy(batch: Iterable[tuple[Array, Array]]) -> None:
    for into, source in batch:
        np.copyto(into, source)
