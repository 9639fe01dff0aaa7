"""The arrays of one item of a step, opened through TensorStore; their failures named by leaf."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from storage.dtypes import dtype_named
from storage.errors import (
    CorruptionError,
    LeafNotFoundError,
    StoreUnavailableError,
    translate,
)
from storage.four_bits import PackedReads, packed_axis
from storage.manifest import LeafRecord
from storage.orbax_tree import StoredForm, StoredTree
from storage.uri import StoreURI

__all__ = ["NEXT_STEP", "NODE_POOL", "ItemArrays", "LeafInfo"]

NODE_POOL = "cache_pool#nodes"
"""Nodes of the OCDBT tree are kept here; decoded chunks are not kept at all."""

NEXT_STEP = "Restore the step's files, or use another step."
_OPENS_AT_ONCE = 256


@dataclass(frozen=True)
class LeafInfo:
    """What is known of a leaf without reading it.

    Attributes:
        path: keys joined by "/".
        shape: global shape; () for a scalar.
        dtype: as it is read; typed PRNG keys are the uint32 words they hold.
        chunks: shape of the smallest part that can be decoded; None if nothing is stored
            (a leaf without elements).
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf as it is read."""
        return math.prod(self.shape) * self.dtype.itemsize


class ItemArrays:
    """The leaves of an item, by path. Safe for use by many threads."""

    def __init__(
        self,
        uri: StoreURI,
        tree: StoredTree,
        forms: Mapping[str, StoredForm],
        records: Mapping[str, LeafRecord] | None,
        context: ts.Context,
    ) -> None:
        """See `CheckpointReader`.

        Args:
            uri: the item's folder.
            tree: what Orbax says of it.
            forms: its leaves that are stored in another form, by path.
            records: the manifest's leaves of it, by path; None without a manifest.
            context: TensorStore context that has `NODE_POOL`.
        """
        self.uri = uri
        self.tree = tree
        self._forms = forms
        self._records = records
        self._context = context
        self._open: dict[str, ts.TensorStore] = {}
        empty = {path for path, form in forms.items() if form.kind == "empty"}
        known = records if records is not None else {*tree.arrays, *empty}
        self._paths = dict.fromkeys(sorted(known))

    def where(self, path: str = "") -> str:
        """How errors name a leaf of this item."""
        return f"{self.uri}: {path}" if path else str(self.uri)

    def infos(self) -> dict[str, LeafInfo]:
        """All leaves. Those that the manifest describes in full are not opened.

        Raises:
            CorruptionError: a leaf's description is damaged, or is not the manifest's.
            StoreUnavailableError: the store gives no answer.
        """
        told = {path: self._told(path) for path in self._paths}
        self._open_all(path for path, info in told.items() if info is None)
        return {path: info or self.info(path) for path, info in told.items()}

    def info(self, path: str) -> LeafInfo:
        """One leaf, as it is stored.

        Raises:
            LeafNotFoundError: the item has no such leaf.
            CorruptionError: its description is damaged, or is not the manifest's.
            StoreUnavailableError: the store gives no answer.
        """
        if path not in self._paths:
            close = difflib.get_close_matches(path, self._paths, n=3)
            raise LeafNotFoundError(
                "no such leaf",
                path=self.where(),
                expected=f"one of its {len(self._paths)} leaves",
                found=repr(path),
                next_step=f"Did you mean {' or '.join(close)}?" if close else "List its leaves.",
            )
        info = self._empty(path) or self._stored(path)
        self._check(info)
        return info

    def array(self, path: str) -> ts.TensorStore | PackedReads:
        """The stored array of a leaf, open for reading, indexed as the leaf is.

        Raises:
            CorruptionError: it is not there, or its description is damaged.
            StoreUnavailableError: the store gives no answer.
        """
        array, form = self._opened(path), self._forms.get(path)
        if form is None or form.kind != "packed":
            return array
        return PackedReads(array, form.dtype, self._packed_axis(path, form, array))

    def wait(self, pending: Any, path: str) -> np.ndarray:
        """What a read of the leaf's array gave, in the leaf's own dtype.

        Raises:
            CorruptionError: data of the leaf is missing or damaged.
            StoreUnavailableError: the store gives no answer.
        """
        stored: np.ndarray = self._result(pending, path)
        match self._forms.get(path):
            case StoredForm(kind="widened", dtype=name):
                return stored.astype(dtype_named(name))
            case StoredForm(kind="bits", dtype=name):
                return stored.view(dtype_named(name))
            case _:
                return stored

    def _told(self, path: str) -> LeafInfo | None:
        """A leaf as the metadata alone tells it; None if it must be opened to know."""
        record = self._records.get(path) if self._records is not None else None
        form = self._forms.get(path)
        is_key = form is not None and form.kind == "key"
        if record is None or record.chunks is None or is_key:
            return self._empty(path)
        return LeafInfo(path, record.shape, dtype_named(record.dtype), record.chunks)

    def _empty(self, path: str) -> LeafInfo | None:
        """A leaf without elements, of which nothing is stored; None for all others."""
        form = self._forms.get(path)
        if form is None or form.kind != "empty":
            return None
        return LeafInfo(path, form.shape, dtype_named(form.dtype), None)

    def _stored(self, path: str) -> LeafInfo:
        array = self._opened(path)
        form = self._forms.get(path)
        shape = tuple(array.shape)
        chunks = array.chunk_layout.read_chunk.shape or shape
        grid = tuple(chunk or size for chunk, size in zip(chunks, shape, strict=True))
        if form is not None and form.kind == "packed":
            axis = self._packed_axis(path, form, array)
            shape, grid = form.shape, (*grid[:axis], 2 * grid[axis], *grid[axis + 1 :])
        carried = form is not None and form.kind in ("widened", "bits", "packed")
        dtype = dtype_named(form.dtype) if form and carried else array.dtype.numpy_dtype
        return LeafInfo(path, shape, dtype, grid)

    def _check(self, info: LeafInfo) -> None:
        """Compare a leaf as stored with the manifest's."""
        record = self._records.get(info.path) if self._records is not None else None
        form = self._forms.get(info.path)
        is_key = form is not None and form.kind == "key"
        if record is None or (is_key and info.shape[: len(record.shape)] == record.shape):
            return
        if is_key or (info.shape, info.dtype.name) != (record.shape, record.dtype):
            raise CorruptionError(
                "not the leaf that was saved",
                path=self.where(info.path),
                expected=f"{record.dtype}{list(record.shape)} as in the manifest",
                found=f"{info.dtype.name}{list(info.shape)}",
                next_step=NEXT_STEP,
            )

    def _packed_axis(self, path: str, form: StoredForm, array: ts.TensorStore) -> int:
        try:
            return packed_axis(form.shape, tuple(array.shape))
        except ValueError as exc:
            raise CorruptionError(
                "not the leaf that was saved",
                path=self.where(path),
                expected=f"{form.dtype}{list(form.shape)}, two in a byte",
                found=f"bytes{list(array.shape)}",
                next_step=NEXT_STEP,
            ) from exc

    def _opened(self, path: str) -> ts.TensorStore:
        self._open_all((path,))
        return self._open[path]

    def _open_all(self, paths: Iterable[str]) -> None:
        """Open the arrays of leaves that are not open yet, many at a time."""
        closed = [path for path in paths if path not in self._open]
        for start in range(0, len(closed), _OPENS_AT_ONCE):
            window = closed[start : start + _OPENS_AT_ONCE]
            pending = [(path, self._start_open(path)) for path in window]
            self._open.update({path: self._result(future, path) for path, future in pending})

    def _start_open(self, path: str) -> Any:
        name = self.tree.arrays.get(path, path.replace("/", "."))
        base = self.uri.kvstore_spec()
        kvstore: dict[str, Any] = {**base, "path": f"{base['path']}{name}/"}
        if self.tree.ocdbt:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": NODE_POOL}
        spec = {
            "driver": "zarr3" if self.tree.zarr3 else "zarr",
            "kvstore": kvstore,
            # Without this an absent chunk reads as zeros.
            "fill_missing_data_reads": self.tree.sparse,
        }
        return ts.open(spec, open=True, read=True, context=self._context)

    def _result(self, future: Any, path: str) -> Any:
        try:
            return future.result()
        except (ValueError, OSError) as exc:
            known = translate(exc, path=self.where(path))
            if isinstance(known, StoreUnavailableError):
                raise known from exc
            raise CorruptionError(
                "stored data of a leaf is missing or damaged",
                path=self.where(path),
                expected="chunks that are all there and pass their checks",
                found=" ".join(str(exc).partition(" [tensorstore_spec=")[0].split())[:400],
                next_step=NEXT_STEP,
            ) from exc
