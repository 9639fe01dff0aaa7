"""Deduplication of unchanged leaves between saves: their files are linked, not written again.

A data file of the previous step also becomes a file of this one: by a hard link on a disk, by the
store's own copy in an object store. Each step is complete by itself: plain Orbax reads it, and it
does not depend on the other step's fate. See ADR 12 and 17.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from cairn.state.checkpointing.saves.dedup_files import DedupFile, link_files, new_files
from cairn.state.checkpointing.saves.dedup_policy import DedupPolicy
from cairn.state.checkpointing.saves.process_records import ProcessRecord, WrittenShard
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_files import (
    Compression,
    Fingerprints,
    ShardToWrite,
    StoredFile,
    has_fingerprints,
)
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.errors import StorageError
from cairn.storage.store.clock import Clock
from cairn.storage.store.uri import StoreURI

__all__ = ["Dedup", "DedupFile", "DedupResult", "DedupSources", "LeafLayout", "WrittenTree"]

_LEAST_LIVE: Final = 0.5
"""Minimum share of a file's bytes that must still be in use for it to be linked."""

_STEPS_REMEMBERED: Final = 256

StepKey = tuple[int, int]
"""(step, attempt)."""


class LeafLayout(NamedTuple):
    """Stored layout of a leaf; only shards of equal layouts can be reused.

    Attributes:
        shape: stored shape.
        dtype: stored dtype, by name.
        cut: outer shards and inner chunks.
        compression: of the chunks.
        form: stored form, if it differs from the leaf's own.
    """

    shape: tuple[int, ...]
    dtype: str
    cut: ChunkShapes
    compression: Compression | None
    form: StoredForm | None


class WrittenTree(NamedTuple):
    """Tree of a step, as far as this process wrote it.

    Attributes:
        folder: of the database that this process wrote into.
        layouts: of the leaves, by path.
        shards: by key; their files are named from `folder`.
        files: data files in `folder`, by name.
        records: what this process wrote; in process 0, in the end, what all wrote.
        descriptions: the description of each array, by its key in the database.
    """

    folder: StoreURI
    layouts: Mapping[str, LeafLayout]
    shards: Mapping[bytes, WrittenShard]
    files: Mapping[str, DedupFile]
    records: tuple[ProcessRecord, ...] = ()
    descriptions: Mapping[bytes, bytes] = MappingProxyType({})


class DedupResult(NamedTuple):
    """Parts of a save that need not be written, and the rest.

    Attributes:
        shards: by key; they lie in `files`, which are linked.
        files: linked data files, by name.
        rest: what must be written.
        fingerprints: by key, of unchanged shards that are in `rest` all the same.
    """

    shards: dict[bytes, WrittenShard]
    files: dict[str, DedupFile]
    rest: list[ShardToWrite]
    fingerprints: dict[bytes, Fingerprints]


class Dedup:
    """State of a tree's deduplication over the saves of a run.

    Attributes:
        policy: how long steps share files.
    """

    def __init__(
        self,
        policy: DedupPolicy,
        clock: Clock,
        doubtful: Callable[[Iterable[StepKey]], Collection[StepKey]],
    ) -> None:
        """Start with a tree that was not saved yet.

        Args:
            policy: how long steps share files.
            clock: returns the current time in UTC.
            doubtful: returns those of the steps (step, attempt) that are known to be damaged.
        """
        self.policy = policy
        self._clock = clock
        self._doubtful = doubtful
        self._saved: WrittenTree | None = None
        self._sharing_steps: deque[StepKey] = deque(maxlen=_STEPS_REMEMBERED)
        self._leaves: dict[str, weakref.ref[Any]] = {}
        self._digests: Mapping[str, bytes] = MappingProxyType({})
        self._changing: set[str] = set()
        self._watched: set[str] = set()

    @property
    def watched(self) -> frozenset[str]:
        """Paths of the leaves of which a save got a new array with equal values."""
        return frozenset(self._watched)

    @property
    def changing(self) -> frozenset[str]:
        """Paths of the leaves of which a save got other values."""
        return frozenset(self._changing)

    @property
    def digests(self) -> Mapping[str, bytes]:
        """Device digests of the last durable step's leaves, by path."""
        return self._digests

    def equal(self, digests: Mapping[str, bytes]) -> frozenset[str]:
        """Return the paths of leaves whose device digests equal those of the last durable step.

        None if their files are known to be damaged: the arrays may be gone by the time a save finds
        that it can't link.
        """
        equal = [path for path, digest in digests.items() if self._digests.get(path) == digest]
        if not equal or self._saved is None or self._is_doubtful(self._saved.folder):
            return frozenset()
        return frozenset(equal)

    def same(self, leaves: Mapping[str, Any]) -> frozenset[str]:
        """Return the paths of leaves that are the last durable step's arrays themselves."""
        return frozenset(
            path
            for path, leaf in leaves.items()
            if (ref := self._leaves.get(path)) is not None and ref() is leaf
        )

    def linkable(
        self, same: Collection[str], compression: Compression | None
    ) -> dict[str, LeafLayout]:
        """Return the leaves whose files the next save will link, unless they are damaged.

        Args:
            same: paths of leaves that equal what the last durable step stored.
            compression: of the next save's chunks.

        Returns:
            By path, the stored layout of each.
        """
        saved, now = self._saved, self._clock()
        if saved is None or not same:
            return {}
        files: dict[str, set[str]] = {}
        stored = [shard for shard in saved.shards.values() if shard.path in same]
        for shard in stored:
            files.setdefault(shard.path, set()).add(shard.ref.file)
        shared = {
            name
            for name in _worth_linking(saved, stored)
            if self.policy.may_link(
                steps=saved.files[name].steps, written=saved.files[name].written, now=now
            )
        }
        return {
            path: saved.layouts[path]
            for path, names in files.items()
            if names <= shared and saved.layouts[path].compression == compression
        }

    def remember(
        self,
        saved: WrittenTree,
        leaves: Mapping[str, weakref.ref[Any]],
        step: StepKey,
        digests: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Store what the next save may reuse of a durable step.

        Args:
            saved: what was written of the tree.
            leaves: its immutable arrays by path.
            step: (step, attempt).
            digests: device digests of its leaves, by path.
        """
        saved = saved._replace(records=(), descriptions={})  # nobody reads them any more
        self._saved, self._leaves, self._digests = saved, dict(leaves), digests
        if all(file.steps == 1 for file in saved.files.values()):
            self._sharing_steps.clear()
        self._sharing_steps.append(step)

    def forget(self) -> None:
        """Link nothing in the next save: one failed after all writes, perhaps due to its links."""
        self._saved, self._leaves, self._digests = None, {}, {}

    def written(self, folder: StoreURI, files: Iterable[StoredFile]) -> dict[str, DedupFile]:
        """Return the files that this save has just written into `folder`'s database, by name."""
        return new_files(folder, files, self._clock())

    def reuse(
        self,
        shards: Iterable[ShardToWrite],
        layouts: Mapping[str, LeafLayout],
        same: frozenset[str],
        folder: StoreURI,
        *,
        linked: Mapping[str, DedupFile] = MappingProxyType({}),
    ) -> DedupResult:
        """Link unchanged shards into the database in `folder`.

        A leaf that changed once is not compared again, unless it is the same array: what training
        changes keeps changing. All others get fingerprints when they are written. A file that is
        damaged, or was shared for long enough, is not linked: its shards are written. On a disk,
        where steps share a single copy, nothing is linked once one of them is known to be damaged.

        Args:
            shards: all that is to be stored.
            layouts: of the leaves, by path.
            same: paths of leaves that are known to equal what was saved.
            folder: the database's.
            linked: files in it that were linked for other shards of this save, by name.
        """
        todo = list(shards)
        unchanged = self._unchanged(todo, layouts, same)
        files: dict[str, DedupFile] = {}
        if self._saved is not None and unchanged and not self._is_doubtful(folder):
            names = _worth_linking(self._saved, unchanged.values())
            candidates = {name: self._saved.files[name] for name in names if name not in linked}
            files = link_files(
                self._saved.folder, folder, candidates, policy=self.policy, now=self._clock()
            )
            files |= {name: linked[name] for name in names if name in linked}
        kept = {key: shard for key, shard in unchanged.items() if shard.ref.file in files}
        fingerprints = {
            key: shard.fingerprints
            for key, shard in unchanged.items()
            if key not in kept and shard.fingerprints is not None
        }
        rest = [
            shard._replace(
                fingerprinted=shard.key not in fingerprints and shard.path not in self._changing
            )
            for shard in todo
            if shard.key not in kept
        ]
        return DedupResult(kept, files, rest, fingerprints)

    def _is_doubtful(self, folder: StoreURI) -> bool:
        """Return True if nothing may be linked; in a bucket each step has a verified copy."""
        if folder.scheme != "file":
            return False
        try:
            return bool(self._doubtful(self._sharing_steps))
        except StorageError:  # unknown: writing anew is always right
            return True

    def _unchanged(
        self, shards: list[ShardToWrite], layouts: Mapping[str, LeafLayout], same: frozenset[str]
    ) -> dict[bytes, WrittenShard]:
        """Return the last durable step's shards of those leaves that did not change."""
        saved = self._saved
        if saved is None:
            return {}
        by_path: dict[str, list[ShardToWrite]] = {}
        for shard in shards:
            by_path.setdefault(shard.path, []).append(shard)
        return {
            shard.key: saved.shards[shard.key]
            for path, group in by_path.items()
            if saved.layouts.get(path) == layouts[path]
            and self._is_unchanged(path, group, saved, path in same)
            for shard in group
        }

    def _is_unchanged(
        self, path: str, group: list[ShardToWrite], saved: WrittenTree, same: bool
    ) -> bool:
        if any(shard.key not in saved.shards for shard in group):
            return False
        if same:
            return True
        if path in self._changing:
            return False
        for shard in group:
            fingerprints = saved.shards[shard.key].fingerprints
            if fingerprints is None or not has_fingerprints(shard, fingerprints):
                self._changing.add(path)
                self._watched.discard(path)
                return False
        self._watched.add(path)
        return True


class DedupSources:
    """Steps that wrote the data files of the last durable step, as process 0 knows them.

    Names of data files are random, and a link keeps the name: a file whose name an earlier step
    had is shared with it, whichever process linked it.
    """

    def __init__(self) -> None:
        """Start without any: this process has not saved the run yet."""
        self._steps: dict[str, StepKey] = {}

    def of(self, names: Iterable[str]) -> dict[str, StepKey]:
        """Return the source of each of those files that an earlier step wrote."""
        return {name: self._steps[name] for name in names if name in self._steps}

    def remember(self, names: Iterable[str], *, step: int, attempt: int) -> None:
        """Store the sources of a durable step's files."""
        self._steps = {
            name: self._steps.get(name, (step, attempt)) for name in names if is_data_file(name)
        }


def _worth_linking(saved: WrittenTree, kept: Iterable[WrittenShard]) -> list[str]:
    """Return the files of which enough bytes are still in use."""
    live: dict[str, int] = {}
    for shard in kept:
        live[shard.ref.file] = live.get(shard.ref.file, 0) + shard.ref.length
    return [
        name for name, size in live.items() if size >= _LEAST_LIVE * saved.files[name].record.size
    ]
