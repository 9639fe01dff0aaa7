"""What was looked into last, kept for the next request: steps, how they differ, and statistics.

It takes seconds to read what a step of many leaves holds. Statistics are kept by what they are of,
so that what two steps share is read once.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

from cairn.storage.reading import Change, CheckpointReader, diff_leaves
from cairn.storage.runs import LeafRecord, Manifest, Run, StepContents, StepIndex, StepInfo
from cairn.storage.store import Confinement, StoreURI

LEAVES: Final = 100_000
"""Most leaves that are kept, of all steps together; one and a half kilobytes each."""

DIFFERENCES: Final = 100_000
"""Most leaves that differ which are kept, of all diffs together; half a kilobyte each."""

STATISTICS: Final = 4096
"""Statistics that are kept; a kilobyte each."""

RECLAIMABLE: Final = 20_000
"""Runs of which is kept what retention would free; a few hundred bytes each."""

_LEAF_BYTES: Final = 1500  # a leaf that is kept

_DIFF: Final = 16  # a diff of no leaves takes as much as so many of them

Found = TypeVar("Found")


class Known(Generic[Found]):
    """What was found last, by what it is of. Safe for use by many threads."""

    def __init__(self, most: int, size: Callable[[Found], int] = lambda _: 1) -> None:
        """Of few enough entries.

        Args:
            most: Of their sizes together; an entry that is larger is kept alone.
            size: Of an entry.
        """
        self._most, self._size = most, size
        self._entries: OrderedDict[Hashable, Found] = OrderedDict()
        self._together = 0
        self._lock = threading.Lock()

    def peek(self, content: Hashable) -> Found | None:
        """What is known of some content; None: nothing is."""
        with self._lock:
            return self._entries.get(content)

    def get(self, content: Hashable, find: Callable[[], Found]) -> Found:
        """What is known of some content; if that is nothing, it is found and kept.

        Args:
            content: Another for everything of which something else is found.
            find: Finds it.
        """
        with self._lock:
            if content in self._entries:
                self._entries.move_to_end(content)
                return self._entries[content]
        found = find()
        with self._lock:
            if content not in self._entries:
                self._entries[content] = found
                self._together += self._size(found)
            while len(self._entries) > 1 and self._together > self._most:
                self._together -= self._size(self._entries.popitem(last=False)[1])
        return found


class LeafForm(NamedTuple):
    """What many leaves of a step have in common.

    Attributes:
        shape, dtype, spec: As in its record.
        nbytes: Of it.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | tuple[str, ...] | None, ...] | None
    nbytes: int


class ToldLeaf(NamedTuple):
    """What is said of a leaf, beside its name: in little room.

    Attributes:
        form: One for all leaves that have the same.
        digest: Of its elements.
    """

    form: LeafForm
    digest: str | None

    @classmethod
    def of(cls, leaf: LeafRecord, forms: dict[LeafForm, LeafForm] | None = None) -> "ToldLeaf":
        """A leaf; `forms` are those of leaves before."""
        form = LeafForm(leaf.shape, leaf.dtype, leaf.spec, leaf.nbytes)
        return cls(form if forms is None else forms.setdefault(form, form), leaf.digest)


class LeafChange(NamedTuple):
    """A leaf that is not known to be the same in two steps; as `reading.LeafDifference`."""

    item: str
    path: str
    change: Change
    this: ToldLeaf | None
    other: ToldLeaf | None


class StepChanges(NamedTuple):
    """The leaves that differ between two steps, by item and path, and how many do not."""

    leaves: tuple[LeafChange, ...]
    equal: int

    @classmethod
    def between(cls, this: "OpenStep", other: "OpenStep") -> "StepChanges":
        """Those of two steps."""
        forms: dict[LeafForm, LeafForm] = {}
        found, equal = diff_leaves(this.leaves, other.leaves)
        changes = (
            LeafChange(
                one.item,
                one.path,
                one.change,
                None if one.this is None else ToldLeaf.of(one.this, forms),
                None if one.other is None else ToldLeaf.of(one.other, forms),
            )
            for one in found
        )
        return cls(tuple(changes), equal)

    @property
    def size(self) -> int:
        """How much room it takes, in leaves."""
        return len(self.leaves) + _DIFF


@dataclass(frozen=True)
class OpenStep:
    """A listed step.

    Attributes:
        uri: Its folder in its run.
        manifest: Its manifest.
        manifest_digest: That of it; nothing else has it.
        contents: What the manifest names.
    """

    uri: StoreURI
    manifest: Manifest
    manifest_digest: str | None
    contents: StepContents

    @property
    def size(self) -> int:
        """How much room it takes, in leaves: the pages of its index that were read stay."""
        index = self.manifest.index
        others = len(self.manifest.inline_objects) if index is None else index.size // _LEAF_BYTES
        return max(len(self.contents.leaves), others)

    @cached_property
    def leaves(self) -> list[LeafRecord]:
        """Every leaf, by item and path."""
        return sorted(self.contents.leaves, key=attrgetter("item", "path"))

    @cached_property
    def _by_path(self) -> dict[tuple[str, str], LeafRecord]:
        return {(leaf.item, leaf.path): leaf for leaf in self.leaves}

    def leaf(self, item: str, path: str) -> LeafRecord | None:
        """A leaf; None if the step has no such one."""
        return self._by_path.get((item, path))

    def reader(self) -> CheckpointReader:
        """What reads its values, for one request: it keeps open whatever it has read.

        Raises:
            StorageError: As `CheckpointReader.open`.
        """
        if isinstance(self.contents, StepIndex):
            return CheckpointReader.of(self.uri, self.manifest, self.contents)
        return CheckpointReader.open(self.uri, self.manifest)


_Key = tuple[Confinement | None, str, str]
"""How far a step may lead, where it is, and the digest of its manifest."""


class OpenSteps:
    """The steps that were asked for last. Safe for use by many threads.

    Attributes:
        changes: What differs between two of them, by their digests: of two large ones only one
            is kept.
    """

    def __init__(self, leaves: int = LEAVES, differences: int = DIFFERENCES) -> None:
        """Of at most so many leaves, and leaves that differ; a step that has more is kept alone."""
        self._leaves = leaves
        self.changes: Known[StepChanges] = Known(differences, lambda one: one.size)
        self._steps: OrderedDict[_Key, OpenStep] = OrderedDict()
        self._opening: dict[_Key, threading.Lock] = {}
        self._lock = threading.Lock()

    def open(self, run: Run, info: StepInfo) -> OpenStep:
        """A step that was just seen to be listed.

        Raises:
            StepNotFoundError: It has no manifest.
            CorruptionError, UnsupportedFormatError: Its manifest or its index can't be read.
            StoreUnavailableError: The store gives no answer.
        """
        uri = run.step_uri(info)
        if info.manifest_digest is None:
            return _opened(run, info)
        key = (uri.confinement, str(uri), info.manifest_digest)
        with self._lock:
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # of many that ask at once, one reads
            with self._lock:
                known = self._steps.get(key)
            try:
                found = known or _opened(run, info)
            finally:
                with self._lock:
                    self._opening.pop(key, None)
            with self._lock:
                self._keep(key, found)
        return found

    def _keep(self, key: _Key, step: OpenStep) -> None:
        self._steps[key] = step
        self._steps.move_to_end(key)
        while len(self._steps) > 1 and self._count() > self._leaves:
            self._steps.popitem(last=False)

    def _count(self) -> int:
        return sum(step.size for step in self._steps.values())


def _opened(run: Run, info: StepInfo) -> OpenStep:
    manifest = run.manifest(info)
    contents = run.contents(info)
    return OpenStep(run.step_uri(info), manifest, info.manifest_digest, contents)
