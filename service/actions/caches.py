"""Caches of steps, their differences, and statistics.

It takes seconds to read the contents of a step with many leaves. Statistics are cached by content,
so leaves that two steps share are read once.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.reading.step_diff import Change, diff_leaves
from cairn.storage.runs.records.manifest import LeafRecord, Manifest
from cairn.storage.runs.records.step_contents import StepContents
from cairn.storage.runs.records.step_index import StepIndex
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store.uri import Confinement, StoreURI

LEAVES: Final = 100_000
"""Largest number of cached leaves, of all steps together; 1.5 kB each."""

DIFFERENCES: Final = 100_000
"""Largest number of cached differing leaves, of all diffs together; 0.5 kB each."""

STATISTICS: Final = 4096
"""Largest number of cached statistics; 1 kB each."""

RECLAIMABLE: Final = 20_000
"""Largest number of runs with a cached amount of reclaimable bytes; a few hundred bytes each."""

_LEAF_BYTES: Final = 1500  # memory of a cached leaf

_DIFF: Final = 16  # size of an empty diff, in leaves

Entry = TypeVar("Entry")


class LRUCache(Generic[Entry]):
    """LRU cache by content. Safe for use by many threads."""

    def __init__(self, max_size: int, size: Callable[[Entry], int] = lambda _: 1) -> None:
        """Create an empty cache.

        Args:
            max_size: Largest sum of the entries' sizes; a larger entry is cached alone.
            size: Returns the size of an entry.
        """
        self._max_size, self._size = max_size, size
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()

    def peek(self, content: Hashable) -> Entry | None:
        """Return the cached entry of a content; None: there is none."""
        with self._lock:
            return self._entries.get(content)

    def get(self, content: Hashable, compute: Callable[[], Entry]) -> Entry:
        """Return the entry of a content; compute and cache it if it is missing.

        Args:
            content: Key that differs wherever the entry differs.
            compute: Computes the entry.
        """
        with self._lock:
            if content in self._entries:
                self._entries.move_to_end(content)
                return self._entries[content]
        entry = compute()
        with self._lock:
            if content not in self._entries:
                self._entries[content] = entry
                self._total += self._size(entry)
            while len(self._entries) > 1 and self._total > self._max_size:
                self._total -= self._size(self._entries.popitem(last=False)[1])
        return entry


class LeafForm(NamedTuple):
    """Properties that many leaves of a step share.

    Attributes:
        shape, dtype, spec: Values of the leaf's record.
        nbytes: Size in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | tuple[str, ...] | None, ...] | None
    nbytes: int


class LeafSummary(NamedTuple):
    """Compact form of a leaf, without its name.

    Attributes:
        form: Object that all leaves with equal properties share.
        digest: Digest of its elements.
    """

    form: LeafForm
    digest: str | None

    @classmethod
    def of(cls, leaf: LeafRecord, forms: dict[LeafForm, LeafForm] | None = None) -> "LeafSummary":
        """Convert a leaf.

        Args:
            leaf: The leaf.
            forms: Forms that other leaves of the step use already; a new one is added.
        """
        form = LeafForm(leaf.shape, leaf.dtype, leaf.spec, leaf.nbytes)
        return cls(form if forms is None else forms.setdefault(form, form), leaf.digest)


class LeafChange(NamedTuple):
    """Leaf that may differ between two steps; see `reading.LeafDifference`."""

    item: str
    path: str
    change: Change
    this: LeafSummary | None
    other: LeafSummary | None


class StepChanges(NamedTuple):
    """Leaves that differ between two steps, by item and path, and the number of equal ones."""

    leaves: tuple[LeafChange, ...]
    equal: int

    @classmethod
    def between(cls, this: "OpenStep", other: "OpenStep") -> "StepChanges":
        """Compare the leaves of two steps."""
        forms: dict[LeafForm, LeafForm] = {}
        differences, equal = diff_leaves(this.leaves, other.leaves)
        changes = (
            LeafChange(
                leaf.item,
                leaf.path,
                leaf.change,
                None if leaf.this is None else LeafSummary.of(leaf.this, forms),
                None if leaf.other is None else LeafSummary.of(leaf.other, forms),
            )
            for leaf in differences
        )
        return cls(tuple(changes), equal)

    @property
    def size(self) -> int:
        """Size in the cache, in leaves."""
        return len(self.leaves) + _DIFF


@dataclass(frozen=True)
class OpenStep:
    """Listed step, with its manifest and contents.

    Attributes:
        uri: Folder of the step in its run.
        manifest: Manifest of the step.
        manifest_digest: Digest of the manifest, unique to it.
        contents: Contents that the manifest names.
    """

    uri: StoreURI
    manifest: Manifest
    manifest_digest: str | None
    contents: StepContents

    @property
    def size(self) -> int:
        """Size in the cache, in leaves; pages of its index stay in memory once they are read."""
        index = self.manifest.index
        others = len(self.manifest.inline_objects) if index is None else index.size // _LEAF_BYTES
        return max(len(self.contents.leaves), others)

    @cached_property
    def leaves(self) -> list[LeafRecord]:
        """All leaves, by item and path."""
        return sorted(self.contents.leaves, key=attrgetter("item", "path"))

    @cached_property
    def array_items(self) -> list[str]:
        """Names of the items that hold arrays, in order."""
        return sorted({leaf.item for leaf in self.contents.leaves})

    @cached_property
    def _by_path(self) -> dict[tuple[str, str], LeafRecord]:
        return {(leaf.item, leaf.path): leaf for leaf in self.leaves}

    def leaf(self, item: str, path: str) -> LeafRecord | None:
        """Return a leaf; None: the step has no such leaf."""
        return self._by_path.get((item, path))

    def reader(self) -> CheckpointReader:
        """Open a reader of its values for one request; the reader keeps its files open.

        Raises:
            StorageError: See `CheckpointReader.open`.
        """
        if isinstance(self.contents, StepIndex):
            return CheckpointReader.of(self.uri, self.manifest, self.contents)
        return CheckpointReader.open(self.uri, self.manifest)


_Key = tuple[Confinement | None, str, str]
"""Confinement of a step, its address, and the digest of its manifest."""


class StepCache:
    """LRU cache of opened steps. Safe for use by many threads.

    Attributes:
        changes: Cached differences between two steps, by the folders and manifest digests of both.
    """

    def __init__(self, leaves: int = LEAVES) -> None:
        """Create an empty cache.

        Args:
            leaves: Largest number of leaves of the cached steps; a step with more is cached alone.
        """
        self._max_leaves = leaves
        self.changes: LRUCache[StepChanges] = LRUCache(DIFFERENCES, lambda changes: changes.size)
        self._steps: OrderedDict[_Key, OpenStep] = OrderedDict()
        self._opening: dict[_Key, threading.Lock] = {}
        self._lock = threading.Lock()

    def open(self, run: Run, info: StepInfo) -> OpenStep:
        """Open a step that was just seen to be listed.

        Raises:
            StepNotFoundError: The step has no manifest.
            CorruptionError, UnsupportedFormatError: Its manifest or its index is unreadable.
            StoreUnavailableError: The store does not answer.
        """
        uri = run.step_uri(info)
        if info.manifest_digest is None:
            return _opened(run, info)
        key = (uri.confinement, str(uri), info.manifest_digest)
        with self._lock:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # of many concurrent callers, one reads
            with self._lock:
                cached = self._steps.get(key)
            try:
                step = cached or _opened(run, info)
            finally:
                with self._lock:
                    self._opening.pop(key, None)
            with self._lock:
                self._steps[key] = step
                self._steps.move_to_end(key)
                # Summed anew each time: a step grows as pages of its index are read.
                sizes = [step.size for step in self._steps.values()]
                while len(sizes) > 1 and sum(sizes) > self._max_leaves:
                    self._steps.popitem(last=False)
                    del sizes[0]
        return step


def _opened(run: Run, info: StepInfo) -> OpenStep:
    manifest = run.manifest(info)
    contents = run.contents(info)
    return OpenStep(run.step_uri(info), manifest, info.manifest_digest, contents)
