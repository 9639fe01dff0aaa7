"""Weights of a stored model with adapters merged and quantized weights dequantized.

A model with adapters or quantized weights stores several leaves for one weight. A `ServedLeaf`
computes blocks of the weight from stored blocks. Only the adapters and scales of one weight are
held whole in memory.

Source: arXiv 2106.09685 (adapters), arXiv 2305.14314 appendix E (nf4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.errors import ConversionError
from cairn.storage.reading.item_arrays import LeafInfo
from cairn.storage.reading.reader import CheckpointReader

__all__ = ["AdapterLeaves", "ServedLeaf", "adapters_of", "served_leaves"]

QUANTIZED: Final = "/array/qvalue"
SCALE: Final = "/array/scale"
LORA_A, LORA_B = "_lora_a", "_lora_b"

_NF4: Final = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


class ServedLeaf(Protocol):
    """A `Leaf` with the memory that `blocks` needs besides the yielded block."""

    @property
    def shape(self) -> Shape:
        """Shape of the weight."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the weight."""
        ...

    @property
    def held_bytes(self) -> int:
        """Most bytes of memory that `blocks` needs besides the yielded block."""
        ...

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        """Yield the weight's blocks; see `Leaf.blocks`."""
        ...


@dataclass(frozen=True)
class AdapterLeaves:
    """The adapters of a stored model.

    Attributes:
        rank: usual rank.
        alpha: the adapters' output is scaled by alpha / rank.
        pairs: leaves of A [in, rank] and B [rank, out], by the path of the kernel beside them.
    """

    rank: int
    alpha: float
    pairs: Mapping[str, tuple[StoredLeaf, StoredLeaf]]

    def pair(self, kernel: str) -> tuple[Array, Array]:
        """Return A and B of the kernel with this path, read into memory."""
        a, b = self.pairs[kernel]
        return a.whole(), b.whole()


def served_leaves(
    reader: CheckpointReader, item: str, infos: Mapping[str, LeafInfo]
) -> dict[str, ServedLeaf]:
    """Return the weights of a stored model by path, adapters merged and all dequantized.

    Args:
        reader: open reader of the step.
        item: name of the model's item.
        infos: the item's leaves, without those of random streams.

    Raises:
        ConversionError: parts of adapters or of quantized weights are missing or do not fit each
            other; all are listed.
    """
    leaves: dict[str, ServedLeaf] = {
        path: StoredLeaf(reader, item, info)
        for path, info in infos.items()
        if not path.endswith((LORA_A, LORA_B))
    }
    adapters = adapters_of(reader, item, infos)
    problems = [*_dequantize(leaves), *_merge(leaves, adapters, infos)]
    if problems:
        raise ConversionError(
            path=f"{reader.uri}: {item}",
            expected="matrices, each with all of its adapter or of its quantized form",
            found=f"{len(problems)} that are not",
            next_step="load the model (EasyDeLBaseModule.from_pretrained takes the run), call "
            "dequantize() and unwrap_lora_to_layers(), and save_pretrained() it",
            problems=problems,
        )
    return leaves


def adapters_of(
    reader: CheckpointReader, item: str, infos: Mapping[str, LeafInfo]
) -> AdapterLeaves | None:
    """Return the adapters of a stored model; None if it has none.

    Args:
        reader: open reader of the step.
        item: name of the model's item.
        infos: the item's leaves.
    """
    module = reader.meta().get("module")
    settings = module.get("lora") if isinstance(module, dict) else None
    if not settings:
        return None
    kernels = [path.removesuffix(LORA_A) for path in infos if path.endswith(LORA_A)]
    pairs = {
        kernel: (
            StoredLeaf(reader, item, infos[kernel + LORA_A]),
            StoredLeaf(reader, item, infos[kernel + LORA_B]),
        )
        for kernel in kernels
        if kernel + LORA_B in infos
    }
    return AdapterLeaves(int(settings["rank"]), float(settings["alpha"]), pairs)


def _dequantize(leaves: dict[str, ServedLeaf]) -> list[str]:
    """Replace codes and scales in `leaves` by dequantized weights; return a line per problem."""
    problems = []
    for path in [path for path in leaves if path.endswith(QUANTIZED)]:
        weight = path.removesuffix(QUANTIZED)
        codes, scale = leaves.pop(path), leaves.pop(f"{weight}{SCALE}", None)
        if isinstance(scale, StoredLeaf) and _divides(scale.shape, codes.shape):
            leaves[weight] = _Dequantized(codes, scale)
            continue
        shape = "none" if scale is None else str(list(scale.shape))
        problems.append(f"{weight}: expected scales that divide {list(codes.shape)}, found {shape}")
    return problems


def _merge(
    leaves: dict[str, ServedLeaf], adapters: AdapterLeaves | None, infos: Mapping[str, LeafInfo]
) -> list[str]:
    """Replace kernels in `leaves` by merged ones; return a line for each unfit adapter."""
    pairs = {} if adapters is None else adapters.pairs
    paired = {f"{kernel}{end}" for kernel in pairs for end in (LORA_A, LORA_B)}
    problems = [
        f"{path}: expected A and B beside a kernel, of a model that was saved with adapters"
        for path in infos
        if path.endswith((LORA_A, LORA_B)) and path not in paired
    ]
    for kernel, (a, b) in pairs.items():
        base = leaves.get(kernel)
        if base is None or not _fits(base.shape, a.shape, b.shape):
            shape = "no kernel" if base is None else str(list(base.shape))
            problems.append(
                f"{kernel}: expected [in, out] with A [in, rank] and B [rank, out], found {shape} "
                f"with {list(a.shape)} and {list(b.shape)}"
            )
        elif adapters is not None:
            leaves[kernel] = _Merged(base, a, b, adapters.alpha / adapters.rank)
    return problems


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf as it is stored.

    Attributes:
        reader: open reader of the step.
        item: name of the model's item.
        info: path, shape and dtype of the leaf.
    """

    reader: CheckpointReader
    item: str
    info: LeafInfo
    held_bytes: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of the leaf."""
        return tuple(self.info.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the leaf."""
        return self.info.dtype

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        """Yield the leaf's blocks; see `Leaf.blocks`."""
        axes = [*range(len(self.shape))]
        if transpose:
            axes[-2:] = axes[:-3:-1]
        index = None if at is None else (at,)
        for block in self.reader.iter_blocks(
            self.item, self.info.path, max_bytes=max_bytes, transpose=axes, index=index
        ):
            yield block if at is None else block.reshape(block.shape[1:])

    def whole(self) -> Array:
        """Return the whole leaf."""
        out = np.empty(self.shape, self.dtype)
        flat, at = out.reshape(-1), 0
        for block in self.blocks(1 << 24, transpose=False):
            flat[at : at + block.size] = block.reshape(-1)
            at += block.size
        return out


@dataclass(frozen=True)
class _Dequantized:
    """Quantized weight: `codes * scale`, or `nf4[codes] * scale` for unsigned 4-bit codes.

    Each entry of the scale applies to a box of codes.
    """

    codes: ServedLeaf
    scale: StoredLeaf

    @property
    def shape(self) -> Shape:
        return self.codes.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.scale.dtype

    @property
    def held_bytes(self) -> int:
        return math.prod(self.scale.shape) * self.dtype.itemsize + _computing_bytes(self.dtype)

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        scale = self.scale.whole()
        if at is not None:
            raise ValueError("a quantized weight has no parts")
        shape = self.shape
        if transpose:
            scale, shape = np.swapaxes(scale, -1, -2), (*shape[:-2], shape[-1], shape[-2])
        boxes = [length // count for length, count in zip(shape, scale.shape, strict=True)]
        most = max(1, min(max_bytes, _WORKING_BYTES) // self.dtype.itemsize)
        for rows, block in _rows(self.codes.blocks(most, transpose=transpose), shape):
            values = _NF4[block.astype(np.uint8)] if block.dtype.name == "uint4" else block
            entries = scale[np.arange(rows.start, rows.stop) // boxes[0]]
            for axis, box in enumerate(boxes[1:], 1):
                entries = np.repeat(entries, box, axis=axis)
            yield values.astype(self.dtype) * entries


@dataclass(frozen=True)
class _Merged:
    """Matrix with its adapter merged: W + scale A B, computed in float32."""

    base: ServedLeaf
    a: StoredLeaf
    b: StoredLeaf
    scale: float

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.base.dtype

    @property
    def held_bytes(self) -> int:
        sizes = math.prod(self.a.shape) + math.prod(self.b.shape)
        return self.base.held_bytes + 8 * sizes + _computing_bytes(self.dtype)

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        if at is not None:
            raise ValueError("a matrix has no parts")
        first, second = self.a.whole().astype(np.float32), self.b.whole().astype(np.float32)
        shape = self.shape
        if transpose:
            first, second, shape = second.T, first.T, shape[::-1]
        most = min(max_bytes, _WORKING_BYTES)
        for rows, block in _rows(self.base.blocks(most, transpose=transpose), shape):
            change = (first[rows] @ second) * np.float32(self.scale)
            with np.errstate(over="ignore", invalid="ignore"):  # the writer counts them
                yield (block.astype(np.float32) + change).astype(self.dtype)


_WORKING_BYTES: Final = 8 << 20


def _computing_bytes(dtype: np.dtype[Any]) -> int:
    """Return the bytes to compute a block of `_WORKING_BYTES`: float32 copies and indices."""
    return 4 * _WORKING_BYTES * max(1, 4 // dtype.itemsize)


def _rows(blocks: Iterator[Array], shape: Shape) -> Iterator[tuple[slice, Array]]:
    """Yield the rows of a block, and the block; blocks within one row are joined first."""
    row, at, parts = math.prod(shape[1:]), 0, []
    for block in blocks:
        parts.append(block.reshape(-1))
        size = sum(part.size for part in parts)
        if size % max(1, row):
            continue
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        count = size // max(1, row)
        yield slice(at, at + count), flat.reshape(count, *shape[1:])
        at, parts = at + count, []


def _divides(scale: Shape, codes: Shape) -> bool:
    return len(scale) == len(codes) >= 1 and all(
        count and not length % count for count, length in zip(scale, codes, strict=True)
    )


def _fits(kernel: Shape, a: Shape, b: Shape) -> bool:
    matrices = len(kernel) == len(a) == len(b) == 2
    return matrices and kernel == (a[0], b[1]) and a[1] == b[0]
