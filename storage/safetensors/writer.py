"""Writer of sharded safetensors files to any store, in bounded memory.

The header needs shapes and dtypes only, so it is written before any data is read. A few blocks are
read ahead, so that reads and writes overlap. A file becomes visible whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.storage.errors import StorageError, UnsupportedLeafError
from cairn.storage.safetensors.format import dtype_code, encode_header
from cairn.storage.safetensors.reader import read_header, read_tensor
from cairn.storage.safetensors.sizes import parse_size
from cairn.storage.store.files import Files
from cairn.storage.store.prefetch import prefetch

__all__ = [
    "BLOCKS_IN_FLIGHT",
    "BLOCK_BYTES",
    "TENSORS_AT_ONCE",
    "Shard",
    "TensorSource",
    "WrittenFile",
    "index_bytes",
    "peak_bytes",
    "plan_shards",
    "read_header",
    "read_tensor",
    "shard_header",
    "write_index",
    "write_shard",
]

BLOCK_BYTES: Final = 8 << 20
"""Maximum size of a block of a tensor, in bytes."""

TENSORS_AT_ONCE: Final = 2
"""Number of large tensors, or groups of small ones, that are read concurrently in threads."""

BLOCKS_IN_FLIGHT: Final = 1 + 2 * TENSORS_AT_ONCE
"""Number of blocks in memory.

One is written; of each tensor that is read, one waits and one is in the making.
"""

PT_METADATA: Final[Mapping[str, str]] = {"format": "pt"}

_SMALL_READS: Final = 4
_HEADER_BYTES: Final = 512
"""Bytes of memory per header entry, without its name: making the header copies it often."""
_READING_BYTES: Final = 192 << 20
"""Bytes of memory for the chunks that become blocks.

They are two rows of chunks, one being read and one being used, and freed memory that decoding
threads keep.
"""


@dataclass(frozen=True)
class TensorSource:
    """Tensor that is not read yet.

    Attributes:
        name: name of the tensor in the file.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        blocks: given a limit in bytes, yields its elements in C order as consecutive blocks of
            `dtype`, each at most about that large. May be called from other threads, repeatedly.
        held_bytes: most bytes of memory that `blocks` needs besides the current block. If they
            exceed a block, no other large tensor is read at the same time.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Callable[[int], Iterator[np.ndarray]]
    held_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """File to write.

    Attributes:
        file_name: name of the file, such as "model-00001-of-00003.safetensors".
        tensors: its tensors.
        nbytes: bytes of the tensors, without the header.
        header: header of another format, whose tensors follow in the given order; None:
            safetensors.
        alignment: for another format: number of bytes to whose multiple each tensor is padded with
            zeros.
    """

    file_name: str
    tensors: tuple[TensorSource, ...]
    nbytes: int
    header: bytes | None = None
    alignment: int = 1


class WrittenFile(NamedTuple):
    """Result of `write_shard`.

    Attributes:
        size: bytes of the whole file.
        read_back: as in `FileWriter`.
    """

    size: int
    read_back: str | None


def plan_shards(
    sources: Sequence[TensorSource], max_shard_size: int | str = "5GB", *, prefix: str = "model"
) -> list[Shard]:
    """Return the files over which tensors are distributed, in the given order.

    A tensor that is larger than `max_shard_size` gets a file of its own.

    Args:
        sources: all tensors.
        max_shard_size: most bytes of tensors per file, in a form that `parse_size` accepts.
        prefix: start of the file names. A single file is "<prefix>.safetensors".

    Raises:
        UnsupportedLeafError: two tensors have the same name, or a dtype is not in safetensors; all
            are listed.
        UnsupportedFormatError: `max_shard_size` is not a size.
    """
    limit = parse_size(max_shard_size)
    _check_sources(sources)
    groups: list[list[TensorSource]] = [[]]
    filled = 0
    for source in sources:
        if groups[-1] and filled + source.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(source)
        filled += source.nbytes
    count = len(groups)
    return [
        Shard(
            f"{prefix}.safetensors"
            if count == 1
            else f"{prefix}-{number:05d}-of-{count:05d}.safetensors",
            tuple(group),
            sum(source.nbytes for source in group),
        )
        for number, group in enumerate(groups, start=1)
    ]


def write_shard(
    files: Files,
    rel: str,
    shard: Shard,
    *,
    on_bytes: Callable[[int], None] | None = None,
    on_data: Callable[[memoryview], None] | None = None,
    metadata: Mapping[str, str] = PT_METADATA,
    read_back: bool = False,
) -> WrittenFile:
    """Write one file, and return its size and checksum.

    In a safetensors file the tensors are ordered by falling element size, which aligns each to its
    element size. The memory use is at most `peak_bytes`. On any error nothing becomes visible under
    `rel`, and an earlier file there stays.

    Args:
        files: the store's folder.
        rel: the file's name in it.
        shard: the file to write.
        on_bytes: called with the number of bytes just written, header included; an exception from
            it stops the write.
        on_data: called with each part of the file just before it is written, for a checksum.
        metadata: free text for the header.
        read_back: whether to read the file back, see `Files.open_write`.

    Raises:
        UnsupportedLeafError: a dtype is not in safetensors.
        StorageError: a source yields other bytes than its shape and dtype announce.
        StoreFullError: no space or quota left.
        StoreUnavailableError: the store gives no answer.
    """
    tensors, header = _in_order(shard), shard_header(shard, metadata)
    written = 0
    sink = files.open_write(rel, read_back=read_back)
    with sink, closing(_blocks(tensors, shard.alignment)) as blocks:
        for data in itertools.chain([memoryview(header)], blocks):
            if on_data is not None:
                on_data(data)
            sink.write(data)
            written += len(data)
            if on_bytes is not None:
                on_bytes(len(data))
            del data
    return WrittenFile(written, sink.read_back)


def shard_header(shard: Shard, metadata: Mapping[str, str] = PT_METADATA) -> bytes:
    """Return all that `write_shard` writes before the tensors.

    Raises:
        UnsupportedLeafError: a dtype is not in safetensors.
    """
    if shard.header is not None:
        return shard.header
    return encode_header([(t.name, t.dtype, t.shape) for t in _in_order(shard)], metadata)


def _in_order(shard: Shard) -> Sequence[TensorSource]:
    """Return the tensors in their order in the file."""
    if shard.header is not None:
        return shard.tensors
    return sorted(shard.tensors, key=lambda tensor: -tensor.dtype.itemsize)


def peak_bytes(shard: Shard) -> int:
    """Return the most memory that `write_shard` uses for a file, reads included."""
    buffered = max((tensor.held_bytes for tensor in shard.tensors), default=0)
    header = sum(_HEADER_BYTES + len(tensor.name) for tensor in shard.tensors)
    return BLOCKS_IN_FLIGHT * BLOCK_BYTES + _READING_BYTES + buffered + header


def index_bytes(shards: Sequence[Shard], *, metadata: Mapping[str, Any] | None = None) -> bytes:
    """Return the content of the index that maps tensors to files.

    Args:
        shards: all files.
        metadata: more entries beside `total_size`.
    """
    index = {
        "metadata": {**(metadata or {}), "total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {t.name: shard.file_name for shard in shards for t in shard.tensors},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def write_index(
    files: Files, rel: str, shards: Sequence[Shard], *, metadata: Mapping[str, Any] | None = None
) -> int:
    """Write the index that maps tensors to files; return its size in bytes.

    Args:
        files: the store's folder.
        rel: name of the index, such as "model.safetensors.index.json".
        shards: all files.
        metadata: more entries beside `total_size`.

    Raises:
        StoreFullError: no space or quota left.
        StoreUnavailableError: the store gives no answer.
    """
    data = index_bytes(shards, metadata=metadata)
    with files.open_write(rel) as sink:
        sink.write(data)
    return len(data)


def _check_sources(sources: Sequence[TensorSource]) -> None:
    problems: list[str] = []
    seen: set[str] = set()
    for source in sources:
        if source.name in seen:
            problems.append(f"{source.name}: twice")
        seen.add(source.name)
        try:
            dtype_code(source.dtype, path=source.name)
        except UnsupportedLeafError:
            problems.append(f"{source.name}: {source.dtype} is no dtype of safetensors")
    if problems:
        raise UnsupportedLeafError(
            "tensors that can't be written",
            path="; ".join(problems),
            expected="each name once, with a dtype of safetensors",
            found=f"{len(problems)} that do not fit",
            next_step="Convert these to a supported dtype, or leave them out.",
        )


def _blocks(tensors: Sequence[TensorSource], alignment: int) -> Generator[memoryview, None, None]:
    """Yield the bytes of `tensors` in order, reading the next tensors ahead."""
    ahead: deque[tuple[ExitStack, Iterator[memoryview], bool]] = deque()
    with ThreadPoolExecutor(_SMALL_READS, "cairn-tensors") as pool:
        try:
            for group in _groups(tensors):
                alone = any(tensor.held_bytes > BLOCK_BYTES for tensor in group)
                while ahead and (alone or ahead[-1][2] or len(ahead) == TENSORS_AT_ONCE):
                    yield from _next_group(ahead)
                began = ExitStack()
                blocks = began.enter_context(prefetch(_group_blocks(group, pool, alignment), 1))
                ahead.append((began, blocks, alone))
            while ahead:
                yield from _next_group(ahead)
        finally:
            for began, _, _ in ahead:
                began.close()


def _next_group(
    ahead: deque[tuple[ExitStack, Iterator[memoryview], bool]],
) -> Iterator[memoryview]:
    """Yield all blocks of the first tensor or group in the queue, and remove it."""
    began, blocks, _ = ahead[0]
    yield from blocks
    began.close()
    ahead.popleft()


def _group_blocks(
    group: Sequence[TensorSource], pool: ThreadPoolExecutor, alignment: int
) -> Generator[memoryview, None, None]:
    """Yield the blocks of a large tensor, or of a group of small ones, read concurrently."""
    reads: deque[Future[list[memoryview]]] = deque()
    if len(group) > 1:
        reads.extend(pool.submit(list, _checked_blocks(tensor)) for tensor in group)
    try:
        for tensor in group:
            yield from reads.popleft().result() if reads else _checked_blocks(tensor)
            if missing := -tensor.nbytes % alignment:
                yield memoryview(bytes(missing))
    finally:
        for read in reads:
            read.cancel()


def _groups(tensors: Sequence[TensorSource]) -> Iterator[list[TensorSource]]:
    group: list[TensorSource] = []
    filled = 0
    for tensor in tensors:
        if group and filled + tensor.nbytes > BLOCK_BYTES:
            yield group
            group, filled = [], 0
        group.append(tensor)
        filled += tensor.nbytes
    if group:
        yield group


def _checked_blocks(tensor: TensorSource) -> Iterator[memoryview]:
    """Yield the tensor's bytes, block by block.

    Raises:
        StorageError: the number or dtype of the elements is not what the tensor announced.
    """
    total = 0
    for block in tensor.blocks(BLOCK_BYTES):
        total += block.nbytes
        if block.dtype != tensor.dtype or total > tensor.nbytes:
            raise _mismatch(tensor, f"{total} or more bytes, a block of {block.dtype}")
        # NumPy can't export a buffer of an ml_dtypes dtype, but any array can be viewed as bytes.
        yield np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        del block
    if total != tensor.nbytes:
        raise _mismatch(tensor, f"{total} bytes")


def _mismatch(tensor: TensorSource, found: str) -> StorageError:
    return StorageError(
        "a tensor's blocks don't add up",
        path=tensor.name,
        expected=f"{tensor.nbytes} bytes of {tensor.dtype}{list(tensor.shape)}",
        found=found,
        next_step="Correct the source of this tensor; nothing was written.",
    )
