"""A step of a model of 405 billion parameters, with Adam's moments: its records, and no arrays.

The shapes follow from the configuration that Meta published for Llama 3.1 405B; the leaves are cut
into shards and chunks as a save from a mesh of `fsdp=16` cuts them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from cairn.interop.config.decoder import DecoderConfig
from cairn.storage.arrays.chunks import ChunkShapes, inner_chunk_shape, outer_shard_shape
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.runs.records.index_writer import PlacedShard, make_index
from cairn.storage.runs.records.layout import COMMIT_FILE, INDEX_FILE, step_dir
from cairn.storage.runs.records.manifest import LeafRecord, Manifest, ModelInfo, ObjectRecord
from cairn.storage.runs.records.placed import place_of
from cairn.storage.runs.run import Run
from cairn.storage.runs.writer import Writer
from cairn.storage.store.clock import rfc3339, utc_now

CONFIG: Final = DecoderConfig(
    vocab_size=128256,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)
SAVED_FROM: Final = 16  # devices along `fsdp`


class _Leaf(NamedTuple):
    item: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int


def save(folder: Path) -> None:
    """Make a run whose step 1 has these leaves."""
    run = Run.create(str(folder))
    writer = Writer(run, writer="benchmark")
    attempt = writer.claim(1)
    name = f"{step_dir(attempt, 1)}/{INDEX_FILE}"
    leaves, shards, objects = [], {}, []
    for leaf in _leaves():
        cut = _cut(leaf)
        file = ObjectRecord(
            name=f"{leaf.item}/d/{hashlib.md5(f'{leaf.item}/{leaf.path}'.encode()).hexdigest()}",
            size=math.prod(leaf.shape) * leaf.itemsize,
            crc32c="00000000",
            content=f"words-64:{0:016x}",
        )
        leaves.append(
            LeafRecord(
                item=leaf.item,
                path=leaf.path,
                shape=leaf.shape,
                dtype=leaf.dtype,
                chunks=cut.chunk,
                shards=cut.shard,
            )
        )
        shards[leaf.item, leaf.path] = list(_shards(leaf, cut, file.name))
        objects.append(file)
    manifest = Manifest(
        step=1,
        attempt=attempt,
        created=rfc3339(utc_now()),
        writer="benchmark",
        items=("meta", "model", "optimizer"),
        model=ModelInfo(
            model_type="llama", model_class="DecoderForCausalLM", config=CONFIG.to_dict()
        ),
    )
    data, indexed = make_index(
        manifest,
        place_of(run.objects, name),
        leaves=leaves,
        forms={},
        meta_digest=None,
        shards=shards,
        objects=objects,
        origins={},
    )
    run.objects.write(f"{step_dir(attempt, 1)}/{COMMIT_FILE}", b"")
    run.objects.write(name, data)
    writer.publish(indexed)
    writer.close()


def _leaves() -> Iterator[_Leaf]:
    for path, shape in shapes():
        yield _Leaf("model", path, shape, "bfloat16", 2)
    for moment in ("mu", "nu"):
        for path, shape in shapes():
            yield _Leaf("optimizer", f"0/{moment}/{path}", shape, "float32", 4)
    yield _Leaf("optimizer", "0/count", (), "int32", 4)


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter of the model."""
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    queries, shared = (
        heads * CONFIG.head_size for heads in (CONFIG.num_attention_heads, CONFIG.kv_heads)
    )
    layer = {
        "input_layernorm/scale": (hidden,),
        "mlp/down_proj/kernel": (inner, hidden),
        "mlp/gate_proj/kernel": (hidden, inner),
        "mlp/up_proj/kernel": (hidden, inner),
        "post_attention_layernorm/scale": (hidden,),
        "self_attn/k_proj/kernel": (hidden, shared),
        "self_attn/o_proj/kernel": (queries, hidden),
        "self_attn/q_proj/kernel": (hidden, queries),
        "self_attn/v_proj/kernel": (hidden, shared),
    }
    yield "lm_head/kernel", (hidden, CONFIG.vocab_size)
    yield "model/embed_tokens/embedding", (CONFIG.vocab_size, hidden)
    for number in range(CONFIG.num_hidden_layers):
        for name, shape in layer.items():
            yield f"model/layers/{number}/{name}", shape
    yield "model/norm/scale", (hidden,)


def _cut(leaf: _Leaf) -> ChunkShapes:
    part = leaf.shape
    if len(part) > 1:
        part = (part[0] // SAVED_FROM, *part[1:])
    shard = outer_shard_shape(part, leaf.itemsize)
    return ChunkShapes(shard, inner_chunk_shape(leaf.shape, shard, leaf.itemsize))


def _shards(leaf: _Leaf, cut: ChunkShapes, file: str) -> Iterator[PlacedShard]:
    counts = tuple(n // m for n, m in zip(cut.shard, cut.chunk, strict=True))
    nbytes = math.prod(cut.shard) * leaf.itemsize
    grid = tuple(n // m for n, m in zip(leaf.shape, cut.shard, strict=True))
    for number, cell in enumerate(np.ndindex(grid)):
        origin = tuple(a * n for a, n in zip(cell, cut.shard, strict=True))
        digests = np.zeros(counts, np.uint64)
        yield PlacedShard(origin, ValueRef(file, number * nbytes, nbytes), digests)
