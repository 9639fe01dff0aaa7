"""Conversion of a model's leaves to another format's tensors, as streams of blocks.

A `Leaf` may be stored in a checkpoint or in memory. Leaves that are renamed, transposed, joined,
unstacked or interleaved stream in bounded memory; other operations load all leaves of one rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from cairn.counts import count_text
from cairn.interop.conversion.ops import (
    Array,
    Chain,
    Interleaved,
    Op,
    Rename,
    Shape,
    Split,
    Stack,
    Transpose,
)
from cairn.interop.conversion.rules import Rule
from cairn.interop.errors import ArgumentError, ConversionError
from cairn.storage.arrays.boxes import fill
from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.safetensors.writer import TensorSource

FLOAT_NAMES = ("float32", "float16", "bfloat16", "float64")


class Leaf(Protocol):
    """Leaf of a model, wherever it is stored."""

    @property
    def shape(self) -> Shape:
        """Shape of the leaf."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the leaf, `ml_dtypes` included."""
        ...

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        """Yield the leaf as consecutive blocks in C order.

        Args:
            max_bytes: most bytes of a block; one row may be larger.
            transpose: swap the last two axes first.
            at: yield only this index of the leading axis; None: the whole leaf.
        """
        ...


@dataclass(frozen=True)
class MemoryLeaf:
    """Leaf in host memory, or copied there by `fetch` when it is needed.

    Attributes:
        shape: shape of the leaf.
        dtype: dtype of the leaf.
        fetch: returns the leaf's array at an index of the leading axis; for None the whole array.
    """

    shape: Shape
    dtype: np.dtype[Any]
    fetch: Callable[[int | None], Any]

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        """Return the leaf's blocks, as `Leaf.blocks` describes them."""
        whole: Array = np.asarray(self.fetch(at))
        return cut(np.swapaxes(whole, -1, -2) if transpose else whole, max_bytes)


def streams(
    rules: Sequence[Rule],
    leaves: Mapping[str, Leaf],
    *,
    dtype: np.dtype[Any] | None = None,
    joined: np.dtype[Any] | None = None,
    path: str,
) -> list[TensorSource]:
    """Return the tensors that the rules make from the leaves, in the order of the rules.

    Args:
        rules: rules that `match` returned, so that every leaf exists and fits.
        leaves: the model's leaves, by their paths.
        dtype: dtype to which floating tensors are cast; None: each keeps its own.
        joined: dtype to which leaves are cast if they differ in dtype and become one tensor; None:
            `dtype`.
        path: name of the conversion in the error, such as a folder.

    Raises:
        ConversionError: leaves of several dtypes become one tensor, and neither `dtype` nor
            `joined` is set; all such tensors are listed.
    """
    common = dtype if joined is None else joined
    problems = _several_dtypes(rules, leaves, castable=common is not None)
    if problems:
        raise ConversionError(
            path=path,
            expected="leaves of one dtype where they become one tensor",
            found=f"{count_text(len(problems), 'tensor')} of several",
            next_step="name a floating dtype, to which all weights are cast, or cast these leaves",
            problems=problems,
        )
    sources = []
    for rule in rules:
        inputs = [leaves[name] for name in rule.leaves]
        if common is not None and len({np.dtype(leaf.dtype) for leaf in inputs}) > 1:
            inputs = [_CastLeaf(leaf, common) for leaf in inputs]
        tensors = _tensor_streams(rule.op, [_View(leaf) for leaf in inputs])
        for name, tensor in zip(rule.tensors, tensors, strict=True):
            target = dtype if dtype is not None and is_floating(tensor.dtype) else tensor.dtype
            blocks = _Cast(tensor, target)
            sources.append(TensorSource(name, tensor.shape, target, blocks, tensor.held_bytes))
    return sources


def cut(array: Array, max_bytes: int) -> Iterator[Array]:
    """Yield an array as consecutive C-order blocks of at most `max_bytes` (or one row) each."""
    if array.ndim == 0 or array.nbytes <= max_bytes:
        yield _in_c_order(array)
        return
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    rows = max(1, max_bytes // max(1, row_bytes))
    for start in range(0, array.shape[0], rows):
        yield _in_c_order(array[start : start + rows])


def _in_c_order(array: Array) -> Array:
    """Return an array in C order; a transposed one is copied in tiles, ten times as fast."""
    if array.flags.c_contiguous:
        return array
    ordered = np.empty(array.shape, array.dtype)
    fill(ordered, array)
    return ordered


def float_dtype(value: Any, *, argument: str) -> np.dtype[Any] | None:
    """Return the floating dtype of a name or of a NumPy or JAX dtype; None for None.

    Raises:
        ArgumentError: `value` is anything else; the known names are listed.
    """
    if value is None:
        return None
    names = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in FLOAT_NAMES}
    dtype = names.get(value) if isinstance(value, str) else np.dtype(value)
    if dtype is None or not is_floating(dtype):
        raise ArgumentError(
            path=argument,
            expected=f"a floating dtype: {', '.join(FLOAT_NAMES)}",
            found=repr(value),
        )
    return dtype


class _Stream(Protocol):
    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def held_bytes(self) -> int: ...

    def blocks(self, max_bytes: int, /) -> Iterator[Array]: ...


def _several_dtypes(
    rules: Sequence[Rule], leaves: Mapping[str, Leaf], *, castable: bool
) -> list[str]:
    """Return a line for each rule whose leaves differ in dtype and can't be cast to one."""
    problems = []
    for rule in rules:
        dtypes = {name: np.dtype(leaves[name].dtype) for name in rule.leaves}
        alike = len({*dtypes.values()}) < 2
        if not alike and not (castable and all(map(is_floating, dtypes.values()))):
            listed = ", ".join(f"{name} {dtype.name}" for name, dtype in dtypes.items())
            problems.append(f"{', '.join(rule.tensors)}: {listed}")
    return problems


class _CastLeaf:
    """Leaf in another dtype."""

    def __init__(self, leaf: Leaf, dtype: np.dtype[Any]) -> None:
        self.leaf, self.dtype = leaf, dtype
        self.shape = tuple(leaf.shape)
        self.held_bytes: int = getattr(leaf, "held_bytes", 0)

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        return _Cast(_View(self.leaf, transpose=transpose, at=at), self.dtype)(max_bytes)


class _View:
    """A leaf, or one index of its leading axis; perhaps with the last two axes swapped."""

    def __init__(self, leaf: Leaf, *, transpose: bool = False, at: int | None = None) -> None:
        self.leaf = leaf
        self.transpose = transpose
        self.at = at
        shape = tuple(leaf.shape) if at is None else tuple(leaf.shape[1:])
        (op_shape,) = Transpose().leaf_shapes([shape]) if transpose else [shape]
        self.shape = op_shape
        self.dtype = np.dtype(leaf.dtype)
        self.held_bytes: int = getattr(leaf, "held_bytes", 0)

    def blocks(self, max_bytes: int) -> Iterator[Array]:
        return self.leaf.blocks(max_bytes, transpose=self.transpose, at=self.at)

    def transposed(self) -> _View:
        return _View(self.leaf, transpose=not self.transpose, at=self.at)

    def parts(self) -> list[_View]:
        """Return a view for each index of the leading axis."""
        return [_View(self.leaf, at=number) for number in range(self.shape[0])]


class _Joined:
    """Streams that follow each other along the leading axis of a fused tensor."""

    def __init__(self, parts: Sequence[_Stream]) -> None:
        first = parts[0]
        self.parts = parts
        self.shape: Shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        self.dtype = first.dtype
        self.held_bytes = max(part.held_bytes for part in parts)

    def blocks(self, max_bytes: int) -> Iterator[Array]:
        for part in self.parts:
            yield from part.blocks(max_bytes)


class _InTurns:
    """Two streams of one shape, whose columns alternate."""

    def __init__(self, first: _Stream, second: _Stream, shape: Shape) -> None:
        self.both = (first, second)
        self.shape = shape
        self.dtype = first.dtype
        self.held_bytes = first.held_bytes + second.held_bytes

    def blocks(self, max_bytes: int) -> Iterator[Array]:
        cuts = (part.blocks(max(1, max_bytes // 2)) for part in self.both)
        for pair in zip(*cuts, strict=True):
            (block,) = Interleaved().to_hf(pair)
            yield block


class _Whole:
    """Output of an operation that needs its inputs whole."""

    def __init__(self, op: Op, parts: Sequence[_Stream], index: int, shape: Shape) -> None:
        self.op, self.parts, self.index, self.shape = op, parts, index, shape
        self.dtype = parts[0].dtype
        whole_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
        # Inputs, output, and intermediate arrays of an operation.
        self.held_bytes = 3 * whole_bytes + sum(part.held_bytes for part in parts)

    def blocks(self, max_bytes: int) -> Iterator[Array]:
        tensors = self.op.to_hf([whole(part) for part in self.parts])
        return cut(tensors[self.index], max_bytes)


class _Cast:
    """A stream's `blocks`, in another dtype."""

    def __init__(self, stream: _Stream, dtype: np.dtype[Any]) -> None:
        self.stream, self.dtype = stream, dtype

    def __call__(self, max_bytes: int) -> Iterator[Array]:
        # A wider dtype makes blocks larger: read smaller ones, so that cast ones fit `max_bytes`.
        widening = max(1, self.dtype.itemsize // self.stream.dtype.itemsize)
        for block in self.stream.blocks(max(1, max_bytes // widening)):
            if block.dtype != self.dtype:
                with np.errstate(over="ignore", invalid="ignore"):  # the writer counts them
                    block = block.astype(self.dtype)
            yield block


def whole(stream: _Stream) -> Array:
    """Return a stream as one array."""
    out = np.empty(stream.shape, stream.dtype)
    flat, at = out.reshape(-1), 0
    for block in stream.blocks(1 << 24):
        flat[at : at + block.size] = block.reshape(-1)
        at += block.size
    return out


def _tensor_streams(op: Op, inputs: Sequence[_Stream]) -> list[_Stream]:
    if isinstance(op, Rename):
        return list(inputs)
    if isinstance(op, Chain):
        streams = list(inputs)
        for step in reversed(op.ops):
            streams = _tensor_streams(step, streams)
        return streams
    views = [stream for stream in inputs if isinstance(stream, _View)]
    if isinstance(op, Transpose) and len(views) == len(inputs):
        return [view.transposed() for view in views]
    if isinstance(op, Split) and op.axis == 0:
        return [_Joined(inputs)]
    first_axis = isinstance(op, Stack) and op.axis == 0
    if first_axis and len(views) == 1 and views[0].at is None and not views[0].transpose:
        return list(views[0].parts())
    # A cast leaf's blocks differ in size from another leaf's, so they can't alternate.
    alike = len({(stream.shape, stream.dtype) for stream in inputs}) == 1
    if (
        isinstance(op, Interleaved)
        and alike
        and not any(isinstance(view.leaf, _CastLeaf) for view in views)
    ):
        first, second = inputs
        (shape,) = op.tensor_shapes([first.shape, second.shape])
        return [_InTurns(first, second, shape)]
    shapes = op.tensor_shapes([stream.shape for stream in inputs])
    return [_Whole(op, inputs, index, shape) for index, shape in enumerate(shapes)]
