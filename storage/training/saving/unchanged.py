"""Leaves that did not change since the save before: their files are linked, not written again.

A value file of the step before becomes a file of this one too: by a hard link on a disk, by the
store's own copy in an object store. Each step stays whole by itself: plain Orbax reads it, and
what becomes of the other step does not matter to it. Imports no JAX. See ADR 0012.
"""

import contextlib
import os
import weakref
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from cairn.storage.arrays import (
    VALUE_FOLDER,
    DigestedBox,
    ShardToWrite,
    StoredFile,
    ValueRef,
    has_digests,
)
from cairn.storage.errors import StorageError
from cairn.storage.store import StoreURI, open_files

__all__ = ["Reused", "SavedItem", "SavedShard", "Unchanged"]

_LEAST_LIVE: Final = 0.5
"""Files of which less than this part is still wanted are not linked."""

_LINKS_AT_ONCE: Final = 16


class SavedShard(NamedTuple):
    """An outer shard that was written.

    Attributes:
        path: the leaf's path.
        ref: where it lies.
        box: the digests of its chunks.
    """

    path: str
    ref: ValueRef
    box: DigestedBox


class SavedItem(NamedTuple):
    """What this process wrote of an item of a durable step.

    Attributes:
        folder: of its database.
        layouts: by path: shape, dtype, cut and compression of each leaf.
        shards: by key.
        files: value files by name.
    """

    folder: StoreURI
    layouts: Mapping[str, Hashable]
    shards: Mapping[bytes, SavedShard]
    files: Mapping[str, StoredFile]


class Reused(NamedTuple):
    """What of a save need not be written.

    Attributes:
        shards: by key; they lie in `files`, which are linked.
        files: linked value files.
        rest: what must be written.
    """

    shards: dict[bytes, SavedShard]
    files: list[StoredFile]
    rest: list[ShardToWrite]


class Unchanged:
    """What is known of one item over the saves of a run."""

    def __init__(self) -> None:
        """Of an item that was not saved yet."""
        self._saved: SavedItem | None = None
        self._leaves: dict[str, weakref.ref[Any]] = {}
        self._changing: set[str] = set()

    def same(self, leaves: Mapping[str, Any]) -> frozenset[str]:
        """Paths of the leaves that are the very arrays of the last durable step."""
        return frozenset(
            path
            for path, leaf in leaves.items()
            if (known := self._leaves.get(path)) is not None and known() is leaf
        )

    def remember(self, saved: SavedItem, leaves: Mapping[str, weakref.ref[Any]]) -> None:
        """The step is durable.

        Args:
            saved: what was written of the item.
            leaves: its immutable arrays by path.
        """
        self._saved, self._leaves = saved, dict(leaves)

    def forget(self) -> None:
        """A save failed once all was written: what it linked may be why. The next links nothing."""
        self._saved, self._leaves = None, {}

    def reuse(
        self,
        shards: Iterable[ShardToWrite],
        layouts: Mapping[str, Hashable],
        same: frozenset[str],
        folder: StoreURI,
    ) -> Reused:
        """Link what did not change into the database in `folder`.

        A leaf that was found to have changed once is not looked at again, unless it is the same
        array: in training, what changes goes on to.

        Args:
            shards: all that is to be stored.
            layouts: by path: shape, dtype, cut and compression of each leaf.
            same: paths of leaves that are known to be what was saved.
            folder: the database's.
        """
        todo = list(shards)
        saved = self._saved
        if saved is None:
            return Reused({}, [], todo)
        by_path: dict[str, list[ShardToWrite]] = {}
        for shard in todo:
            by_path.setdefault(shard.path, []).append(shard)
        kept = {
            shard.key: saved.shards[shard.key]
            for path, group in by_path.items()
            if saved.layouts.get(path) == layouts[path]
            and self._is_unchanged(path, group, saved, path in same)
            for shard in group
        }
        linked = _link(saved, _worth_linking(saved, kept.values()), folder)
        kept = {key: shard for key, shard in kept.items() if shard.ref.file in linked}
        rest = [shard for shard in todo if shard.key not in kept]
        return Reused(kept, [saved.files[name] for name in sorted(linked)], rest)

    def _is_unchanged(
        self, path: str, group: list[ShardToWrite], saved: SavedItem, same: bool
    ) -> bool:
        if any(shard.key not in saved.shards for shard in group):
            return False
        if same:
            return True
        if path in self._changing:
            return False
        if all(has_digests(shard, saved.shards[shard.key].box) for shard in group):
            return True
        self._changing.add(path)
        return False


def _worth_linking(saved: SavedItem, kept: Iterable[SavedShard]) -> list[str]:
    """The files of which enough is still wanted."""
    live: dict[str, int] = {}
    for shard in kept:
        live[shard.ref.file] = live.get(shard.ref.file, 0) + shard.ref.length
    return [name for name, size in live.items() if size >= _LEAST_LIVE * saved.files[name].size]


def _link(saved: SavedItem, names: list[str], folder: StoreURI) -> set[str]:
    """The files that are now in `folder` too. One that can't be linked is written anew.

    On a disk so is one of another size than was written, for somebody has damaged it. In a store
    that would cost a request for each; there the save finds it when it lists the step.
    """
    if not names:
        return set()
    if folder.scheme == "file":
        os.makedirs(os.path.join(folder.local_path, VALUE_FOLDER), exist_ok=True)
        return {name for name in names if _hard_link(saved, folder, name)}
    source, target = open_files(saved.folder), open_files(folder)

    def copied(name: str) -> bool:
        with contextlib.suppress(StorageError):
            source.copy(name, target, name)
            return True
        return False

    with ThreadPoolExecutor(min(_LINKS_AT_ONCE, len(names)), "cairn-link") as pool:
        return {name for name, done in zip(names, pool.map(copied, names), strict=True) if done}


def _hard_link(saved: SavedItem, target: StoreURI, name: str) -> bool:
    source = os.path.join(saved.folder.local_path, name)
    with contextlib.suppress(OSError):  # no such call, another disk, or the step was deleted
        if os.stat(source).st_size != saved.files[name].size:
            return False
        os.link(source, os.path.join(target.local_path, name))
        return True
    return False
