"""Stored arrays that stack the layers of a scan: each is read once, and then given layer by layer.

A chunk of such an array usually has all layers in it, so that a read of one layer decodes the
bytes of all. A large array is therefore put into a file in the folder for temporary files
(`TMPDIR`), with the layers one after the other; a small one is kept in memory.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from typing import Any, Final

import numpy as np

from cairn.interop.conversion.ops import Array
from cairn.storage.reading.item_arrays import LeafInfo
from cairn.storage.reading.reader import CheckpointReader

__all__ = ["FREE_BYTES", "KEPT_BYTES", "StackedArrays", "array_bytes", "release"]

KEPT_BYTES: Final = 32 << 20
"""Largest array that is kept in memory."""

_KEPT: Final = 2
"""Arrays that are kept at a time: tensors of the next one are read ahead."""

FREE_BYTES: Final = 1 << 30
"""Free space that is left in the folder for temporary files."""


class StackedArrays:
    """Arrays of one item that stack layers; safe for use by many threads."""

    def __init__(self, reader: CheckpointReader, item: str) -> None:
        """Create it without reading anything.

        Args:
            reader: open reader of the step.
            item: item of the arrays.
        """
        self._reader = reader
        self._item = item
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Array | None] = OrderedDict()

    def layers(self, info: LeafInfo, axis: int) -> Array | None:
        """Return an array with the axis of its layers first; None: read each layer by itself.

        The latter is as good where no chunk has several layers, and all that can be done where
        temporary files have no room.

        Args:
            info: description of the array.
            axis: the axis that counts its layers.
        """
        if info.chunks is None or info.chunks[axis] == 1:
            return None
        with self._lock:  # the array is read by whoever comes first
            if info.path not in self._kept:
                while len(self._kept) >= _KEPT:
                    self._kept.popitem(last=False)
                self._kept[info.path] = self._read(info, axis)
            self._kept.move_to_end(info.path)
            return self._kept[info.path]

    def _read(self, info: LeafInfo, axis: int) -> Array | None:
        shape = (info.shape[axis], *info.shape[:axis], *info.shape[axis + 1 :])
        if info.nbytes <= KEPT_BYTES:
            small: Array = np.moveaxis(self._reader.read(self._item, info.path), axis, 0)
            return small
        if shutil.disk_usage(tempfile.gettempdir()).free - info.nbytes < FREE_BYTES:
            return None
        with tempfile.TemporaryFile() as file:
            try:  # a page of a mapped file that finds no room would end the process
                os.posix_fallocate(file.fileno(), 0, info.nbytes)
            except OSError:
                return None
            mapped = mmap.mmap(file.fileno(), info.nbytes)  # lives as long as its arrays
        layers: Array = np.frombuffer(mapped, np.uint8).view(info.dtype).reshape(shape)
        for box, piece in self._reader.iter_boxes(self._item, info.path):
            layers[(box[axis], *box[:axis], *box[axis + 1 :])] = np.moveaxis(piece, axis, 0)
            release(layers)
        return layers


def release(layers: Array) -> None:
    """Have the pages of an array in a temporary file leave this process; the file keeps them."""
    owner: Any = layers
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


def array_bytes(info: LeafInfo) -> int:
    """Return the memory that an array takes while its layers are given."""
    nbytes = math.prod(info.shape) * info.dtype.itemsize
    return _KEPT * nbytes if nbytes <= KEPT_BYTES else 0
