"""Deduplication of unchanged leaves between saves: their files are linked, not written again.

A data file of the previous step also becomes a file of the new one: on a disk by a hard link, in an
object store by a copy that the store makes. So each step is complete: plain Orbax can read it, also
after the other step is deleted. See ADR 12 and 17.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from cairn.state.checkpointing.dedup_policy import DedupPolicy
from cairn.state.checkpointing.saves.dedup_files import DedupFile, link_files, new_files
from cairn.state.checkpointing.saves.process_records import ProcessRecord, WrittenShard
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_files import (
    Compression,
    Fingerprints,
    ShardToWrite,
    WrittenFile,
    has_fingerprints,
)
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.errors import StorageError
from cairn.storage.store.clock import Clock
from cairn.storage.store.uri import StoreURI

__all__ = ["Dedup", "DedupFile", "DedupResult", "DedupSources", "LeafLayout", "WrittenTree"]

_LEAST_LIVE: Final = 0.5
"""Minimum fraction of a file's bytes that the new step must use; other files are not linked."""

_STEPS_REMEMBERED: Final = 256

StepKey = tuple[int, int]
"""Pair (step, attempt)."""


class LeafLayout(NamedTuple):
    """Stored layout of a leaf; shards can be reused only if the layouts are equal.

    Attributes:
        shape: the stored shape.
        dtype: name of the stored dtype.
        cut: shapes of the outer shards and inner chunks.
        compression: compression of the chunks; None without.
        form: the stored form, if the leaf was converted; else None.
    """

    shape: tuple[int, ...]
    dtype: str
    cut: ChunkShapes
    compression: Compression | None
    form: StoredForm | None


class WrittenTree(NamedTuple):
    """Part of a step's tree that this process wrote.

    Attributes:
        folder: folder of the database that this process wrote into.
        layouts: stored layout of each leaf, by path.
        shards: the shards, by key; names of their files are relative to `folder`.
        files: the data files in `folder`, by name.
        records: record of what this process wrote; on process 0, once the tree is complete, the
            records of all processes.
        descriptions: description of each array, by its key in the database.
    """

    folder: StoreURI
    layouts: Mapping[str, LeafLayout]
    shards: Mapping[bytes, WrittenShard]
    files: Mapping[str, DedupFile]
    records: tuple[ProcessRecord, ...] = ()
    descriptions: Mapping[bytes, bytes] = MappingProxyType({})


class DedupResult(NamedTuple):
    """Division of a save's shards into those in linked files and those to write.

    Attributes:
        shards: the shards in linked files, by key.
        files: the linked data files, by name.
        rest: the shards that must be written.
        fingerprints: fingerprints of those shards in `rest` that did not change, by key.
    """

    shards: dict[bytes, WrittenShard]
    files: dict[str, DedupFile]
    rest: list[ShardToWrite]
    fingerprints: dict[bytes, Fingerprints]


class Dedup:
    """Deduplication of a tree: what of the last durable step the next save may link.

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
            doubtful: function that returns those of the given (step, attempt) that have a record
                of damage.
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
        """Paths of leaves that came as a new array with equal values in some save."""
        return frozenset(self._watched)

    @property
    def changing(self) -> frozenset[str]:
        """Paths of leaves whose values changed in some save."""
        return frozenset(self._changing)

    @property
    def digests(self) -> Mapping[str, bytes]:
        """Device digests of the last durable step's leaves, by path."""
        return self._digests

    def equal(self, digests: Mapping[str, bytes]) -> frozenset[str]:
        """Return the paths of leaves whose device digests equal those of the last durable step.

        Empty if a step that shares its files has a record of damage: the files could not be linked,
        and by the time the save notices, the arrays might be deleted.
        """
        equal = [path for path, digest in digests.items() if self._digests.get(path) == digest]
        if not equal or self._saved is None or self._is_doubtful(self._saved.folder):
            return frozenset()
        return frozenset(equal)

    def same(self, leaves: Mapping[str, Any]) -> frozenset[str]:
        """Return the paths of leaves that are the very array objects of the last durable step."""
        return frozenset(
            path
            for path, leaf in leaves.items()
            if (ref := self._leaves.get(path)) is not None and ref() is leaf
        )

    def linkable(
        self, same: Collection[str], compression: Compression | None
    ) -> dict[str, LeafLayout]:
        """Return the leaves whose files the next save can link, unless the files are damaged.

        Args:
            same: paths of leaves whose values equal those of the last durable step.
            compression: compression of the next save's chunks.

        Returns:
            The stored layout of each such leaf, by path.
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
        """Keep a durable step in mind, so that the next save can link its files.

        Args:
            saved: what this process wrote of the step's tree.
            leaves: references to the tree's immutable arrays, by path.
            step: (step, attempt) of the step.
            digests: device digests of the tree's leaves, by path.
        """
        saved = saved._replace(records=(), descriptions={})  # not needed any more
        self._saved, self._leaves, self._digests = saved, dict(leaves), digests
        if all(file.steps == 1 for file in saved.files.values()):
            self._sharing_steps.clear()
        self._sharing_steps.append(step)

    def forget(self) -> None:
        """Let the next save link nothing; for a save that failed after its writes.

        Damage in linked files may be the reason for the failure.
        """
        self._saved, self._leaves, self._digests = None, {}, {}

    def written(self, folder: StoreURI, files: Iterable[WrittenFile]) -> dict[str, DedupFile]:
        """Return files that were just written into the database in `folder`, by name."""
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

        A leaf whose values changed once is not compared again, since trained leaves keep changing;
        all others get fingerprints when they are written. Files that are damaged, or that the
        policy allows to be shared no longer, are not linked; their shards are written. On a disk,
        where steps share a single copy of a file, nothing is linked once one of these steps has a
        record of damage.

        Args:
            shards: all shards to store.
            layouts: stored layout of each leaf, by path.
            same: paths of leaves that equal the saved ones, and are not compared.
            folder: folder of the database.
            linked: files of the database that were already linked for other shards of this save, by
                name.
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
        """Return True if no file may be linked into `folder`, as a step that shares it is damaged.

        Also True if that can't be read. In an object store this is always False: each step has its
        own, verified copy.
        """
        if folder.scheme != "file":
            return False
        try:
            return bool(self._doubtful(self._sharing_steps))
        except StorageError:  # if unknown, write the values again: that is always right
            return True

    def _unchanged(
        self, shards: list[ShardToWrite], layouts: Mapping[str, LeafLayout], same: frozenset[str]
    ) -> dict[bytes, WrittenShard]:
        """Return those of the last durable step's shards whose leaves did not change, by key."""
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
    """Steps that first wrote the data files of the last durable step; used on process 0.

    Names of data files are random, and a link has the same name: if two steps have a file of the
    same name, they share it.
    """

    def __init__(self) -> None:
        """Start without files, as before this process's first save."""
        self._steps: dict[str, StepKey] = {}

    def of(self, names: Iterable[str]) -> dict[str, StepKey]:
        """Return the (step, attempt) that wrote each of these files; omit files that are new."""
        return {name: self._steps[name] for name in names if name in self._steps}

    def remember(self, names: Iterable[str], *, step: int, attempt: int) -> None:
        """Remember, of a durable step's data files, which step wrote each."""
        self._steps = {
            name: self._steps.get(name, (step, attempt)) for name in names if is_data_file(name)
        }


def _worth_linking(saved: WrittenTree, kept: Iterable[WrittenShard]) -> list[str]:
    """Return the names of files in which the `kept` shards are enough of the bytes to link them."""
    live: dict[str, int] = {}
    for shard in kept:
        live[shard.ref.file] = live.get(shard.ref.file, 0) + shard.ref.length
    return [
        name for name, size in live.items() if size >= _LEAST_LIVE * saved.files[name].record.size
    ]
