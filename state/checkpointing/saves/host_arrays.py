"""Host arrays of a save: staging of the caller's arrays, which may then be donated or deleted.

On CPU, a host array is a view of the array's own buffer, without a copy; if the array is donated
while the view exists, XLA copies it. On GPUs, copies to pinned memory are started, and the save
does not wait for them. From other devices, all transfers start before the first is waited for. If
several processes hold an array, each writes its own boxes of it. Imports JAX. See ADR 0010 and
0051.
"""

import contextlib
import functools
import logging
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cairn.state.checkpointing.holders import holders_of_slices
from cairn.state.checkpointing.leaf_forms import is_key_dtype, store_form
from cairn.state.checkpointing.saves.host_buffers import copy_all
from cairn.storage.arrays.box_buffers import origin_of
from cairn.storage.arrays.chunks import ChunkShapes, inner_chunk_shape, outer_shard_shape
from cairn.storage.arrays.dtypes import dtype_named
from cairn.storage.errors import SaveError, UnsupportedLeafError

__all__ = [
    "ArrayLayout",
    "DeferredLeaf",
    "HostArray",
    "HostBox",
    "HostView",
    "PinnedBox",
    "Transfers",
    "array_layout",
    "host_views",
    "is_in_host_memory",
    "is_read_by_columns",
    "on_gpu",
    "on_host",
    "viewed",
]

_LEAST_SPLIT_BYTES: Final = 1 << 20
"""Minimum bytes of a slice that the processes which hold it divide among them."""

_LEAST_CELL_BYTES: Final = 64 << 10
_MOST_CELLS: Final = 8
"""Maximum number of parts per process when a slice is divided: each part adds index entries."""

_KEEPS_VIEWS: Final = jax.__version_info__[:2] == (0, 11)
"""True for JAX 0.11 (not 0.10 and 0.12), which caches the view of `np.asarray` in the array, not
that of the buffer protocol. While the view exists, XLA copies the array when it is donated."""

_PINNED: Final = "pinned_host"
_HOST_KINDS: Final = frozenset({_PINNED, "unpinned_host"})
_log = logging.getLogger("cairn")

HostView = memoryview | np.ndarray[Any, Any]

_NBYTES: Final = operator.attrgetter("nbytes")

_COLUMN_READ_ITEMS: Final = frozenset({"model", "merged"})
"""Items whose leaves exports transpose, so that they are read by columns, too. The chunks of other
items are always strips of rows."""


class _Box(NamedTuple):
    """Box of a device shard that this process writes.

    Attributes:
        shard: number of the device shard, as in `addressable_data`.
        within: slices of the shard that select the box.
        origin: index in the array of the box's first element.
    """

    shard: int
    within: tuple[slice, ...]
    origin: tuple[int, ...]


class ArrayLayout(NamedTuple):
    """Stored layout of an array.

    Attributes:
        cut: shapes of the outer shards and inner chunks.
        boxes: the boxes that this process writes.
    """

    cut: ChunkShapes
    boxes: tuple[_Box, ...]


class HostBox(NamedTuple):
    """Box that this process writes, on the host.

    Attributes:
        values: the box's elements in host memory, which do not change any more.
        origin: index in the array of the box's first element.
    """

    values: np.ndarray[Any, Any]
    origin: tuple[int, ...]


class PinnedBox(NamedTuple):
    """Box that this process writes, which is being copied to pinned memory.

    Attributes:
        copy: copy of the device shard in pinned memory; no one else refers to it.
        within: slices of the shard that select the box.
        origin: index in the array of the box's first element.
    """

    copy: jax.Array
    within: tuple[slice, ...]
    origin: tuple[int, ...]

    def wait(self) -> HostBox:
        """Wait for the copy and return the box, a view of it that keeps the pinned memory."""
        return HostBox(np.asarray(self.copy)[self.within], self.origin)


class HostArray(NamedTuple):
    """Array in its stored form, with this process's boxes on the host.

    Attributes:
        shape: shape of the whole array.
        dtype: the stored dtype.
        cut: shapes of the outer shards and inner chunks.
        boxes: the boxes that this process writes.
        sharding: the array's sharding; None for a NumPy array.
        key_impl: for the words of typed PRNG keys, the name of their implementation; else None.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    cut: ChunkShapes
    boxes: tuple[HostBox, ...]
    sharding: jax.sharding.Sharding | None
    key_impl: str | None


class DeferredLeaf(NamedTuple):
    """Leaf that equals the last step's: its files are linked; it is copied only if that fails.

    Attributes:
        leaf: the caller's array.
        shape: the stored shape.
        dtype: the stored dtype.
        layout: the stored layout.
    """

    leaf: jax.Array
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: ArrayLayout

    @classmethod
    def of(
        cls, leaf: jax.Array, shape: tuple[int, ...], dtype: str, *, columns: bool
    ) -> "DeferredLeaf":
        """Return the deferred leaf of an array.

        Args:
            leaf: the caller's array.
            shape: the stored shape.
            dtype: name of the stored dtype.
            columns: whether readers also read the array by columns, see `array_layout`.
        """
        kind = dtype_named(dtype)
        layout = _layout(shape, kind.itemsize, leaf.sharding, columns)
        return cls(leaf, shape, kind, layout)

    @property
    def nbytes(self) -> int:
        """Stored bytes of the leaf, on all processes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def outline(self) -> HostArray:
        """Return the host array without boxes: only its description."""
        return HostArray(self.shape, self.dtype, self.layout.cut, (), self.leaf.sharding, None)

    def placeholders(self) -> tuple[HostBox, ...]:
        """Return the boxes of `copy` with the right shapes, but without values: don't read them."""
        shard = np.broadcast_to(
            np.empty((), self.dtype), self.leaf.sharding.shard_shape(self.shape)
        )
        return tuple(HostBox(shard[within], origin) for _, within, origin in self.layout.boxes)

    def copy(self) -> tuple[HostBox, ...]:
        """Copy the boxes to the host now and return them.

        Raises:
            SaveError: the array was deleted or donated in the meantime.
        """
        if self.leaf.is_deleted():
            raise SaveError(
                "values that were to be linked are gone",
                path="a leaf that the last step has stored",
                expected="its files in the last step, or its array, until this save is durable",
                found="files that can't be linked, and an array whose memory a step was given",
                next_step="Save again: the next save copies all values.",
            )
        boxes = []
        for number, within, origin in self.layout.boxes:
            stored, _ = store_form({"": self.leaf.addressable_data(number)})
            host_copy = np.array(_same_memory(stored[""]))
            boxes.append(HostBox(host_copy[within], origin))
        return tuple(boxes)


def on_host() -> bool:
    """Return True if the devices of this job use the host's memory."""
    return bool(jax.default_backend() == "cpu")


def on_gpu() -> bool:
    """Return True if the devices are GPUs, which copy to pinned memory while they compute."""
    return bool(jax.default_backend() == "gpu")


def is_read_by_columns(item: str) -> bool:
    """Return True if readers also read an item's arrays by columns."""
    return item in _COLUMN_READ_ITEMS


class Transfers:
    """Transfers of an item's leaves to the host.

    Attributes:
        layouts: stored layout of each leaf, by path.
    """

    def __init__(self, item: str, leaves: Mapping[str, Any]) -> None:
        """Determine layouts; copy nothing yet.

        Args:
            item: the item's name.
            leaves: arrays of JAX and NumPy, in their stored form, by path.

        Raises:
            UnsupportedLeafError: in a job of several processes, an array is on devices of this
                process only.
        """
        self._keys = {
            path: str(jax.random.key_impl(leaf))
            for path, leaf in leaves.items()
            if is_key_dtype(leaf.dtype)
        }
        self._leaves = {
            path: jax.random.key_data(leaf) if path in self._keys else leaf
            for path, leaf in leaves.items()
        }
        _refuse_local(self._leaves)
        columns = is_read_by_columns(item)
        self.layouts = {
            path: array_layout(leaf, columns=columns) for path, leaf in self._leaves.items()
        }
        self._shards = {
            path: [leaf.addressable_data(box.shard) for box in self.layouts[path].boxes]
            for path, leaf in self._leaves.items()
            if isinstance(leaf, jax.Array)
        }
        self._started: dict[tuple[str, int], jax.Array] = {}

    def sizes(self) -> dict[str, list[int]]:
        """Return the bytes of each box that this process writes, by path."""
        return {
            path: [
                math.prod(
                    len(range(size)[cut]) for size, cut in zip(shape, box.within, strict=True)
                )
                * np.dtype(leaf.dtype).itemsize
                for box, shape in zip(self.layouts[path].boxes, self._shapes(path), strict=True)
            ]
            for path, leaf in self._leaves.items()
        }

    def is_numpy(self, path: str) -> bool:
        """Return True if the leaf is a NumPy array, which the caller may change."""
        return path not in self._shards

    def _shapes(self, path: str) -> list[tuple[int, ...]]:
        """Return the shape of the shard that each box of a leaf belongs to."""
        if path in self._shards:
            return [tuple(shard.shape) for shard in self._shards[path]]
        return [tuple(self._leaves[path].shape)] * len(self.layouts[path].boxes)

    def to_copy(self, *, numpy: bool) -> dict[str, list[int]]:
        """Return the leaves that must be copied, by path, with the host bytes that each box needs.

        In jobs on devices other than CPUs, all JAX arrays must be. A box needs the bytes of its
        whole device shard, since transfers move whole shards.

        Args:
            numpy: whether NumPy arrays must be copied, too.
        """
        sizes = {}
        for path, leaf in self._leaves.items():
            if (numpy and self.is_numpy(path)) or (not on_host() and not self.is_numpy(path)):
                itemsize = np.dtype(leaf.dtype).itemsize
                sizes[path] = [math.prod(shape) * itemsize for shape in self._shapes(path)]
        return sizes

    def start(self, keys: Iterable[tuple[str, int]]) -> None:
        """Start the transfers of some boxes; `copied` then returns them.

        Devices run operations in order: if a later training step is donated an array, its copy has
        been read before the step overwrites it.

        Args:
            keys: (path, number of the box) of each.
        """
        shards = {
            key: shard
            for key in keys
            if key[0] in self._shards
            and not is_in_host_memory(shard := self._shards[key[0]][key[1]])
        }
        if on_gpu():
            copies = _pinned(list(shards.values()))
            if copies is not None:
                self._started |= zip(shards, copies, strict=True)
                return
        # JAX caches an array's host copy for the array's lifetime. New arrays of the same device
        # memory have caches of their own, which are freed with the result of `copied`.
        self._started |= {key: _same_memory(shard) for key, shard in shards.items()}
        for source in self._started.values():
            source.copy_to_host_async()

    def copied(self, keys: Iterable[tuple[str, int]]) -> dict[str, list[HostBox | PinnedBox]]:
        """Return copies of some boxes, by path; after that the caller may donate their arrays.

        Copies to pinned memory may still run.

        Args:
            keys: (path, number of the box) of each.
        """
        copied: dict[str, list[HostBox | PinnedBox]] = {}
        pairs: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        for path, number in keys:
            box = self.layouts[path].boxes[number]
            source = self._started.pop((path, number), None)
            if source is not None and is_in_host_memory(source):
                copied.setdefault(path, []).append(PinnedBox(source, *box[1:]))
                continue
            if source is None:  # the caller may write to this memory, or donate it
                shards = self._shards.get(path)
                # A view that JAX does not cache in the caller's array.
                shard = self._leaves[path] if shards is None else _same_memory(shards[number])
                lasting = np.asarray(shard)[box.within]
                values = np.empty_like(lasting, order="C")
                pairs.append((values, lasting))
            else:
                values = np.asarray(source)[box.within]
                if all(device.platform == "cpu" for device in source.devices()):
                    values = values.copy()
            copied.setdefault(path, []).append(HostBox(values, box.origin))
        copy_all(pairs)
        return copied

    def wait(
        self, *, copied: bool = True, without: Collection[str] = frozenset()
    ) -> dict[str, HostArray]:
        """Wait until all leaves are on the host; return them by path.

        Args:
            copied: whether to copy NumPy arrays, which the caller may change; False if the boxes
                are copied elsewhere.
            without: paths of leaves to return without boxes and without waiting.
        """
        return {
            path: self._host_array(path, leaf, copied, waited=path not in without)
            for path, leaf in self._leaves.items()
        }

    def _host_array(self, path: str, leaf: Any, copied: bool, *, waited: bool) -> HostArray:
        cut, boxes = self.layouts[path]
        shards = self._shards.get(path)
        if not waited:
            boxes, values = (), []
        elif shards is None:
            values = [np.array(leaf) if copied else leaf for _ in boxes]
        else:
            values = [
                _host_view(shard)[box.within] for shard, box in zip(shards, boxes, strict=True)
            ]
        return HostArray(
            shape=tuple(leaf.shape),
            dtype=np.dtype(leaf.dtype),
            cut=cut,
            boxes=tuple(
                HostBox(box_values, box.origin)
                for box_values, box in zip(values, boxes, strict=True)
            ),
            sharding=None if shards is None else leaf.sharding,
            key_impl=self._keys.get(path),
        )


def _pinned(arrays: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Start copies of arrays to pinned memory and return them; None if it does not suffice."""
    places = [array.sharding.with_memory_kind(_PINNED) for array in arrays]
    try:
        copies: list[jax.Array] = jax.device_put(arrays, places)
    except jax.errors.JaxRuntimeError as exc:
        _log.warning("no pinned memory for a save, which waits for its transfers: %s", exc)
        return None
    return copies


def _same_memory(array: jax.Array) -> jax.Array:
    """Return a new array that shares the memory of a single-device array, but not its cache."""
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


def is_in_host_memory(array: jax.Array) -> bool:
    """Return True if an array is in host memory, such as an offloaded optimizer moment.

    Arrays on the default memory of CPU devices do not count unless the job uses other devices.
    """
    device: Any = next(iter(array.sharding.device_set))
    if device.platform == "cpu" != jax.default_backend():
        return True
    return array.sharding.memory_kind in _HOST_KINDS - {device.default_memory().kind}


def _host_view(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return a view of a single-device CPU array that JAX does not cache in the array."""
    return np.asarray(_same_memory(array) if _KEEPS_VIEWS else array)


def host_views(leaves: Mapping[str, Any]) -> dict[str, HostView]:
    """Return views of the arrays that are in host memory already, by path.

    Those are arrays on a single CPU device that have elements and are stored unchanged. Other
    leaves are omitted. Empty if the job has several processes or uses devices other than CPUs.
    """
    if jax.process_count() > 1 or not on_host():
        return {}
    kinds = {*map(type, leaves.values())}
    others = tuple(kind for kind in kinds if not issubclass(kind, jax.Array))
    arrays = leaves
    if others:
        arrays = {path: leaf for path, leaf in leaves.items() if type(leaf) not in others}
    views: dict[str, HostView] = {}
    try:
        views.update(zip(arrays, map(memoryview, arrays.values()), strict=True))  # type: ignore[arg-type]
    except (BufferError, TypeError):  # several devices, another memory kind, or an ml_dtypes dtype
        for path, leaf in arrays.items():
            if path not in views:
                with contextlib.suppress(BufferError, TypeError):
                    views[path] = _host_view(leaf) if _is_bfloat16(leaf) else memoryview(leaf)
    if not all(map(_NBYTES, views.values())):
        return {path: view for path, view in views.items() if view.nbytes}
    return views


def _is_bfloat16(leaf: jax.Array) -> bool:
    """Return True for a bfloat16 array on one device; the buffer protocol has no bfloat16."""
    return (
        leaf.dtype == jnp.bfloat16
        and not isinstance(leaf, jax.core.Tracer)
        and not leaf.is_deleted()
        and leaf.sharding.num_devices == 1
    )


def viewed(view: HostView, sharding: jax.sharding.Sharding, *, columns: bool) -> HostArray:
    """Return the host array of a view from `host_views`.

    Args:
        view: the view.
        sharding: the array's sharding.
        columns: whether readers also read the array by columns.
    """
    values = np.asarray(view)
    cut, (box,) = _layout(values.shape, values.itemsize, sharding, columns)
    host_box = HostBox(values, box.origin)
    return HostArray(values.shape, values.dtype, cut, (host_box,), sharding, None)


def _refuse_local(leaves: Mapping[str, Any]) -> None:
    if jax.process_count() == 1:
        return
    local = [
        path
        for path, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable
    ]
    if local:
        raise UnsupportedLeafError(
            "arrays that only one process has",
            path="; ".join(local),
            expected="arrays over the devices of all processes",
            found=f"{len(local)} on devices of process {jax.process_index()} alone",
            next_step="Place them on a mesh of all devices, for example replicated.",
        )


def array_layout(array: Any, *, columns: bool) -> ArrayLayout:
    """Return the stored layout of `array`, with the boxes that this process writes.

    Args:
        array: an array of JAX or NumPy that has elements.
        columns: whether readers also read the array by columns.
    """
    shape, itemsize = tuple(array.shape), np.dtype(array.dtype).itemsize
    if isinstance(array, jax.Array):
        return _layout(shape, itemsize, array.sharding, columns)
    whole = _Box(0, (slice(None),) * len(shape), (0,) * len(shape))
    boxes = (whole,) if jax.process_index() == 0 else ()
    return ArrayLayout(_cut(shape, shape, itemsize, columns), boxes)


@functools.lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...], itemsize: int, sharding: jax.sharding.Sharding, columns: bool
) -> ArrayLayout:
    """Return the stored layout of arrays of this shape and sharding; cached."""
    holders = holders_of_slices(sharding, shape)
    first: dict[tuple[int, ...], int] = {}
    for number, index in enumerate(sharding.addressable_devices_indices_map(shape).values()):
        first.setdefault(origin_of(index), number)
    shard = sharding.shard_shape(shape)
    sharers = {len(each) for each in holders.values()}
    division = None
    if math.prod(shard) * itemsize >= _LEAST_SPLIT_BYTES:
        division = _division(shard, itemsize, sharers)
    if division is None:
        boxes = [
            _Box(number, (slice(None),) * len(shape), origin)
            for origin, number in first.items()
            if jax.process_index() == holders[origin][0]
        ]
        return ArrayLayout(_cut(shape, shard, itemsize, columns), tuple(boxes))
    axis, cell = division
    boxes = []
    for origin, number in first.items():
        rank = holders[origin].index(jax.process_index())
        count, cells = len(holders[origin]), shard[axis] // cell
        start, stop = (cells * number // count * cell for number in (rank, rank + 1))
        if start < stop:
            within = [slice(None)] * len(shape)
            within[axis] = slice(start, stop)
            at = (*origin[:axis], origin[axis] + start, *origin[axis + 1 :])
            boxes.append(_Box(number, tuple(within), at))
    part = (*shard[:axis], cell, *shard[axis + 1 :])
    return ArrayLayout(_cut(shape, part, itemsize, columns), tuple(boxes))


def _division(
    shard: tuple[int, ...], itemsize: int, sharers: Collection[int]
) -> tuple[int, int] | None:
    """Choose how the processes that hold a slice divide it: an axis, and a part's size along it.

    Each process gets consecutive parts; the numbers of parts differ by at most one. The parts are
    as large as possible while the largest share is within 5 % of the smallest possible. None if the
    slice can't be divided, or each slice is on one process.

    Args:
        shard: shape of the slice.
        itemsize: bytes of an element.
        sharers: the different numbers of processes that hold a slice.
    """
    if max(sharers) == 1:
        return None
    nbytes = math.prod(shard) * itemsize
    costs: dict[tuple[int, int], float] = {}
    for axis, size in enumerate(shard):
        for cells in range(
            2, min(size, nbytes // _LEAST_CELL_BYTES, _MOST_CELLS * max(sharers)) + 1
        ):
            if size % cells == 0:
                costs[axis, size // cells] = max(-(-cells // n) * n / cells for n in sharers)
    if not costs:
        return None
    least = min(costs.values())
    near = [each for each, cost in costs.items() if cost <= least * (1.05 if least > 1 else 1)]
    return min(near, key=lambda each: (-each[1] / shard[each[0]], each[0]))


def _cut(
    shape: tuple[int, ...], part: tuple[int, ...], itemsize: int, columns: bool
) -> ChunkShapes:
    shard = outer_shard_shape(part, itemsize)
    return ChunkShapes(shard, inner_chunk_shape(shape, shard, itemsize, square=columns))
