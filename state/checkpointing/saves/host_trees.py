"""Trees of a save, once the host has their arrays or a first wave of them. Imports JAX."""

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from cairn.state.checkpointing.device_digests import DeviceShard
from cairn.state.checkpointing.save_handle import StagingKind
from cairn.state.checkpointing.saves.dedup import Dedup
from cairn.state.checkpointing.saves.host_arrays import (
    HostArray,
    is_read_by_columns,
    on_gpu,
    on_host,
    viewed,
)
from cairn.state.checkpointing.saves.host_buffers import MIN_COPIED_BYTES, HostBuffers, places
from cairn.state.checkpointing.saves.leaf_records import leaf_records
from cairn.state.checkpointing.saves.preparation import (
    PreparedTree,
    may_be_digested,
    places_of,
    shards_here,
)
from cairn.state.checkpointing.saves.staging import (
    Staging,
    boxes_to_copy,
    copier,
    default_copy_bytes,
    divide_memory,
    pinned_budget,
    plan_waves,
)
from cairn.state.checkpointing.saves.tree_writer import HostTree
from cairn.storage.arrays.data_file_writers import UploadMemory
from cairn.storage.arrays.data_files import Compression
from cairn.storage.runs.records.manifest import LeafRecord

__all__ = ["HostTrees", "Memory", "copies_of"]


class Memory(NamedTuple):
    """Host memory that a save may use.

    Attributes:
        buffers: memory to copy arrays into; small arrays and arrays that equal the last step's are
            still kept as views. None keeps views of all arrays in host memory.
        most: maximum bytes of all copies, see `staging`; None sets no limit.
        uploads: True if the step goes to an object store.
    """

    buffers: HostBuffers | None = None
    most: int | None = None
    uploads: bool = False


class HostTrees(Mapping[str, HostTree]):
    """Items of a save by name, with their arrays on the host.

    If host memory is limited, only a first wave may be there: `copy_rest` copies the others.

    The leaves' descriptions are computed on first use, after `save` has returned, since that takes
    longer than staging a small leaf.
    """

    def __init__(
        self,
        items: Mapping[str, PreparedTree],
        dedup: Callable[[str], Dedup],
        compression: Compression | None,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ) -> None:
        """Wait for the arrays, or for a first wave of them.

        Args:
            items: the items that `prepare` returned, by name.
            dedup: function from an item's name to its deduplication.
            compression: compression of the stored chunks; None without.
            memory: host memory that the copies may use.

        Raises:
            PolicyError: the copies exceed the limit.
        """
        self._dedup = {name: dedup(name) for name in items}
        buffers, kept = memory.buffers, 0
        budget = default_copy_bytes() if memory.most is None and not on_host() else 1
        transfers = {name: item.transfers for name, item in items.items()}
        boxes = boxes_to_copy(transfers, numpy=memory.most is not None and buffers is None)
        left = {(box.item, box.path) for box in boxes}
        if buffers is None:
            self._prepared = dict(items)
            self._arrays = _waited(items, left)
        else:
            copied = copies_of(items, self._dedup.__getitem__)
            kept = copied.nbytes
            self._prepared, self._arrays = _with_copies(items, copied, buffers, left)
        total = sum(box.nbytes for box in boxes)
        self._uploads: UploadMemory | None = None
        if memory.most is not None:
            share = divide_memory(memory.most, kept=kept, staged=total, uploads=memory.uploads)
            self._uploads = UploadMemory(share.uploads) if memory.uploads else None
            budget = share.waves
        unlimited = memory.most is None and on_host()
        self._wave_bytes = math.inf if unlimited else budget / max(1, len(items))
        waves = plan_waves(boxes, pinned_budget(budget) if on_gpu() else budget)
        self._staging = Staging(waves, copier(transfers)) if waves else None
        self._compression = compression
        self._items: dict[str, HostTree] = {}
        self._records: tuple[LeafRecord, ...] = ()
        self._describing = threading.Lock()

    @property
    def records(self) -> tuple[LeafRecord, ...]:
        """Records of all leaves of all items, without digests."""
        self.describe()
        return self._records

    @property
    def waves(self) -> int:
        """Number of waves in which the arrays reach the host; 1 if they all fit."""
        return 1 if self._staging is None else len(self._staging.waves)

    @property
    def staging(self) -> StagingKind:
        """Way in which the arrays reach the host, see `SaveHandle.staging`."""
        if self._staging is None:
            return "views"
        return "snapshot" if self.waves == 1 else "waves"

    def copy_rest(self, timeout: float | None = None) -> bool:
        """Copy the arrays that the host does not have yet.

        Args:
            timeout: maximum seconds to wait; None for no limit.

        Returns:
            False if not all arrays were copied in time; see `Staging.copy_rest`.
        """
        return self._staging is None or self._staging.copy_rest(timeout)

    def end(self, error: BaseException | None) -> None:
        """End the staging, see `Staging.end`."""
        if self._staging is not None:
            self._staging.end(error)

    def describe(self) -> None:
        """Compute the descriptions of the leaves, and drop the references to the caller's leaves.

        A thread that calls this while another does waits for it; later calls do nothing.
        """
        with self._describing:
            self._describe()

    def _describe(self) -> None:
        records: list[LeafRecord] = []
        while self._prepared:
            name, item = next(iter(self._prepared.items()))
            arrays, dedup = _arrays(name, item, self._arrays.pop(name)), self._dedup[name]
            # On CPU, being the same array object proves nothing: the array may share memory with a
            # NumPy array (`jax.device_put`, `from_dlpack`), which the caller can change.
            same = frozenset() if on_host() else dedup.same(item.leaves)
            self._items[name] = HostTree(
                name=name,
                arrays=arrays,
                forms=item.forms,
                dedup=dedup,
                same=same | item.deferred.keys(),
                leaves={
                    path: weakref.ref(leaf)
                    for path, leaf in item.leaves.items()
                    if isinstance(leaf, jax.Array)
                },
                compression=self._compression,
                staging=self._staging,
                uploads=self._uploads,
                deferred=dict(item.deferred),
                wave_bytes=self._wave_bytes,
                digests=item.digests,
                places=_digestible(name, item.leaves, dedup),
            )
            records += leaf_records(name, item, arrays, self._compression)
            del self._prepared[name]
        self._records += tuple(records)

    def __getitem__(self, name: str) -> HostTree:
        self.describe()
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dedup)

    def __len__(self) -> int:
        return len(self._dedup)


def _digestible(item: str, leaves: Mapping[str, Any], dedup: Dedup) -> dict[str, list[DeviceShard]]:
    """Return device, shape and dtype of the shards of leaves that later saves may digest."""
    if on_host():
        return {}
    return {
        path: places_of(leaf, shards_here(item, leaf))
        for path, leaf in leaves.items()
        if path not in dedup.changing and may_be_digested(leaf)
    }


class _Copies(NamedTuple):
    """Arrays that a save copies into kept buffers.

    Attributes:
        views: (item, path) of the arrays that are kept as views.
        boxes: (item, path, number of the box) of the other arrays' boxes.
        nbytes: bytes of all copies.
    """

    views: list[tuple[str, str]]
    boxes: list[tuple[str, str, int]]
    nbytes: int


def copies_of(items: Mapping[str, PreparedTree], dedup: Callable[[str], Dedup]) -> _Copies:
    """Return the arrays of these items that `HostTrees` copies into buffers, if it has any.

    These are all NumPy arrays, since the caller may change them, and large JAX arrays in host
    memory, since XLA would take long to copy them when they are donated. Arrays of the last step
    are not among them: most likely they need not be written.

    Args:
        items: the items that `prepare` returned, by name.
        dedup: function from an item's name to its deduplication.
    """
    donated_late = on_host()  # arrays from other devices are copies already
    views, boxes, sizes = [], [], []
    for name, item in items.items():
        same = dedup(name).same(item.leaves)
        for path, view in item.views.items():
            if view.nbytes >= MIN_COPIED_BYTES and path not in same:
                views.append((name, path))
                sizes.append(view.nbytes)
        for path, part_sizes in item.transfers.sizes().items():
            always = item.transfers.is_numpy(path)
            for number, nbytes in enumerate(part_sizes):
                large = donated_late and nbytes >= MIN_COPIED_BYTES and path not in same
                if always or large:
                    boxes.append((name, path, number))
                    sizes.append(nbytes)
    return _Copies(views, boxes, places(sizes).nbytes)


def _with_copies(
    items: Mapping[str, PreparedTree],
    copied: _Copies,
    buffers: HostBuffers,
    left: Collection[tuple[str, str]],
) -> tuple[dict[str, PreparedTree], dict[str, dict[str, HostArray]]]:
    """Copy arrays into buffers; return the items with copies as their views, and other arrays.

    Args:
        items: the items that `prepare` returned, by name.
        copied: the arrays to copy.
        buffers: memory for the copies.
        left: (item, path) of leaves that come in waves, which get no boxes here.
    """
    waited = _waited(items, left, copied=False)
    views = {name: dict(item.views) for name, item in items.items()}
    copies = iter(
        buffers.copies(
            [np.asarray(views[name][path]) for name, path in copied.views]
            + [waited[name][path].boxes[number].values for name, path, number in copied.boxes]
        )
    )
    for name, path in copied.views:
        views[name][path] = next(copies)
    for name, path, number in copied.boxes:
        array = waited[name][path]
        boxes = list(array.boxes)
        boxes[number] = boxes[number]._replace(values=next(copies))
        waited[name][path] = array._replace(boxes=tuple(boxes))
    return {name: item._replace(views=views[name]) for name, item in items.items()}, waited


def _waited(
    items: Mapping[str, PreparedTree], left: Collection[tuple[str, str]], *, copied: bool = True
) -> dict[str, dict[str, HostArray]]:
    """Wait for the arrays that have no view and return them, by item and path.

    Those whose (item, path) is in `left` are returned without boxes, and are not waited for.
    """
    return {
        name: item.transfers.wait(
            copied=copied, without={path for owner, path in left if owner == name}
        )
        for name, item in items.items()
    }


def _arrays(name: str, item: PreparedTree, waited: Mapping[str, HostArray]) -> dict[str, HostArray]:
    """Return the stored arrays of an item by path, in the order of its leaves."""
    columns = is_read_by_columns(name)
    others = {**waited, **{path: leaf.outline() for path, leaf in item.deferred.items()}}
    return {
        path: viewed(item.views[path], leaf.sharding, columns=columns)
        if path in item.views
        else others[path]
        for path, leaf in item.leaves.items()
        if path in item.views or path in others
    }
