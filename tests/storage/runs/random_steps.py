"""What a step might hold: leaves of every kind, their shards, and the files that these lie in."""

from random import Random

import numpy as np

from cairn import Manifest, ModelInfo
from cairn.storage.arrays.digests import digest_text
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.runs.records.index_writer import PlacedShard
from cairn.storage.runs.records.manifest import AssetRecord, LeafRecord, ObjectRecord
from tests.storage.records import shard_grid

ITEMS = ("model", "optimizer", "average")
FOLDERS = ("d", "ocdbt.process_0/d", "ocdbt.process_1/d")


def random_manifest(rng: Random) -> Manifest:
    """Without an index."""
    return Manifest(
        step=rng.randrange(10**6),
        attempt=rng.randrange(1, 9),
        created="2026-11-21T12:00:00Z",
        writer=rng.choice(["job", "ann@host", "ü"]),
        items=("meta", *ITEMS),
        assets=(AssetRecord(name="t.json", sha256="0" * 64, size=7),) * rng.randrange(2),
        model=rng.choice([None, ModelInfo(model_type="llama", config={"layers": [2, None]})]),
        environment=rng.choice([{}, {"packages": {"jax": "1"}, "devices": 8}]),
    )


def random_parts(rng: Random, leaves: int) -> dict:
    """What `make_index` is given beside the manifest and the place."""
    objects = [*small_files(rng), *data_files(rng)]
    values = [one for one in objects if one.content is not None and "/d/" in one.name]
    parts: dict = {
        "leaves": [],
        "forms": {},
        "meta_digest": rng.choice([None, f"sha256:{'a' * 64}"]),
        "shards": {},
        "objects": objects,
        "origins": {
            one.name: (rng.randrange(9), rng.randrange(1, 3))
            for one in values
            if rng.random() < 0.4
        },
    }
    for number in range(leaves):
        item = rng.choice(ITEMS)
        leaf, form = random_leaf(rng, item, f"{rng.choice(['a', 'b/c', 'ü%2F'])}/{number}")
        if leaf.shards is not None:
            within = [one for one in values if one.name.startswith(f"{item}/")]
            shards = list(random_shards(rng, leaf, within))
            total = sum(int(one.digests.sum()) for one in shards) % 2**64
            leaf = leaf.model_copy(update={"digest": digest_text(total)})
            rng.shuffle(shards)
            parts["shards"][item, leaf.path] = shards
        if form is not None:
            parts["forms"].setdefault(item, {})[leaf.path] = form
        parts["leaves"].append(leaf)
    return parts


def random_leaf(rng: Random, item: str, path: str) -> tuple[LeafRecord, StoredForm | None]:
    """A leaf, and the form that it is stored in."""
    kind = rng.choice(["plain", "plain", "packed", "key", "scalar", "empty", "zstd"])
    rank = 0 if kind == "scalar" else rng.randrange(1, 4)
    chunk = [rng.randrange(1, 4) for _ in range(rank)]
    shard = [size * rng.randrange(1, 4) for size in chunk]
    shape = [size * rng.randrange(1, 4) for size in shard]
    form, dtype = None, "float32"
    match kind:
        case "empty":
            leaf = LeafRecord(item=item, path=path, shape=(0, *shape), dtype=dtype)
            return leaf, StoredForm("empty", leaf.shape, dtype)
        case "packed":
            dtype, form = "int4", StoredForm("packed", tuple(shape), "int4")
        case "key":
            chunk, shard = [*chunk, 2], [*shard, 2]
            dtype, form = "key<fry>", StoredForm("key", tuple(shape), "fry")
    leaf = LeafRecord(
        item=item,
        path=path,
        shape=tuple(shape),
        dtype=dtype,
        spec=rng.choice([None, ("fsdp", None), (("dp", "tp"),)]),
        chunks=tuple(chunk),
        shards=tuple(shard),
        compression="zstd" if kind == "zstd" else None,
    )
    return leaf, form


def random_shards(rng: Random, leaf: LeafRecord, files: list[ObjectRecord]):
    """All shards of a leaf, anywhere in the files."""
    grid, counts = shard_grid(leaf)
    numbers = np.random.default_rng(rng.randrange(2**32))
    for cell in np.ndindex(grid):
        origin = tuple(at * size for at, size in zip(cell, leaf.shards, strict=True))
        ref = ValueRef(rng.choice(files).name, rng.randrange(2**40), rng.randrange(2**32))
        yield PlacedShard(origin, ref, numbers.integers(0, 2**64, counts, np.uint64))


def data_files(rng: Random) -> list[ObjectRecord]:
    """Some for each item."""
    return [
        ObjectRecord(
            name=f"{item}/{rng.choice(FOLDERS)}/{rng.randbytes(16).hex()}",
            size=rng.randrange(2**45),
            crc32c=rng.randbytes(4).hex(),
            content=f"words-64:{rng.randbytes(8).hex()}",
        )
        for item in ITEMS
        for _ in range(rng.randrange(1, 4))
    ]


def small_files(rng: Random) -> list[ObjectRecord]:
    """Those that hold no values, and one that Orbax wrote with another kind of name."""
    names = ("_CHECKPOINT_METADATA", "commit_success.txt", "meta/data.json", "model/_METADATA")
    known = [
        ObjectRecord(name=name, size=rng.randrange(999), crc32c=rng.randbytes(4).hex())
        for name in names
    ]
    return [*known, ObjectRecord(name="model/d/notes", size=3, crc32c="0" * 8)]
