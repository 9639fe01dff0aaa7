import itertools
import json
import math
import threading

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import cairn
from cairn import (
    Shard,
    StorageError,
    TensorSource,
    UnsupportedLeafError,
    open_files,
    plan_shards,
    write_index,
    write_shard,
)
from cairn.storage.safetensors import writer
from cairn.storage.safetensors.format import DTYPES
from cairn.storage.safetensors.reader import read_header, read_tensor
from cairn.storage.safetensors.writer import peak_bytes

NUMBERS = itertools.count(1)


def test_files_are_written_with_public_names_alone(tmp_path):
    arrays = {name: np.arange(6, dtype=np.float32).reshape(2, 3) for name in ("a", "b")}
    sources = [
        cairn.TensorSource(name, one.shape, one.dtype, lambda _, one=one: iter([one]))
        for name, one in arrays.items()
    ]
    files, shards = cairn.open_files(tmp_path), cairn.plan_shards(sources, 24)
    assert all(isinstance(shard, cairn.Shard) for shard in shards)
    for shard in shards:
        cairn.write_shard(files, shard.file_name, shard)
    cairn.write_index(files, "model.safetensors.index.json", shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for name, one in arrays.items():
        np.testing.assert_array_equal(
            safetensors.numpy.load_file(tmp_path / index[name])[name], one
        )


def source(name, array, rows_per_block=None):
    """A tensor in blocks of some rows."""

    def blocks(max_bytes):
        if array.ndim == 0 or rows_per_block is None:
            yield array
            return
        for start in range(0, len(array), rows_per_block):
            yield array[start : start + rows_per_block]

    return TensorSource(name, array.shape, array.dtype, blocks)


def single(*sources):
    (shard,) = plan_shards(sources)
    return shard


def random_array(dtype, shape, seed=0):
    count = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 256, count)
    return raw.astype(np.uint8).view(dtype).reshape(shape)


@pytest.fixture(params=["file", "memory", "gcs"])
def files(request, tmp_path):
    match request.param:
        case "file":
            return open_files(tmp_path / "out")
        case "memory":
            return open_files(f"memory://safetensors-{next(NUMBERS)}/out")
        case _:
            return open_files(f"{request.getfixturevalue('gcs').bucket_uri}/out")


@pytest.fixture
def local(tmp_path):
    return open_files(tmp_path / "out")


def test_reference_library_loads_every_dtype_bit_equal(local, tmp_path):
    arrays = {
        code: random_array(dtype, (3, 4, 2), i) for i, (code, dtype) in enumerate(DTYPES.items())
    }
    arrays |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 7), ml_dtypes.bfloat16)}
    write_shard(local, "model.safetensors", single(*(source(n, a, 2) for n, a in arrays.items())))
    loaded = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tuple(loaded[name].shape) == array.shape
        words = loaded[name].reshape(-1).view(torch.uint8).numpy()
        assert words.tobytes() == array.tobytes(), name
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_header_is_padded_and_every_tensor_is_aligned(local):
    arrays = {"é": np.ones(3, np.uint8), "b": np.ones(5, np.float64), "c": np.ones(3, np.float16)}
    write_shard(local, "x", single(*(source(n, a) for n, a in arrays.items())))
    length = int.from_bytes(local.read_range("x", 0, 8), "little")
    assert length % 8 == 0
    assert local.read_range("x", 8, 9) == b"{"
    header = read_header(local, "x")
    for name, array in arrays.items():
        assert header.tensors[name].start % array.itemsize == 0


def test_written_file_reads_back_from_every_store(files):
    wide = random_array(np.float32, (300, 70))
    on_bytes = []
    shard = single(source("wide", wide, 7), source("short", np.arange(3, dtype=np.int64)))
    written = write_shard(files, "a/b.safetensors", shard, on_bytes=on_bytes.append)
    assert sum(on_bytes) == written.size == files.stat("a/b.safetensors").size
    np.testing.assert_array_equal(read_tensor(files, "a/b.safetensors", "wide"), wide)
    np.testing.assert_array_equal(read_tensor(files, "a/b.safetensors", "short"), [0, 1, 2])


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), max_size=6),
    dtypes=st.lists(st.sampled_from(sorted(DTYPES)), min_size=6, max_size=6),
    rows=st.integers(1, 4),
    limit=st.integers(1, 400),
)
def test_round_trip_over_shapes_blocks_and_shards(tmp_path_factory, shapes, dtypes, rows, limit):
    files = open_files(tmp_path_factory.mktemp("round"))
    arrays = {f"t{i}": random_array(DTYPES[dtypes[i]], shape, i) for i, shape in enumerate(shapes)}
    shards = plan_shards([source(n, a, rows) for n, a in arrays.items()], limit)
    placed = {}
    for shard in shards:
        write_shard(files, shard.file_name, shard)
        assert len(shard.tensors) < 2 or shard.nbytes <= limit
        header = read_header(files, shard.file_name)
        for name in header.tensors:
            placed[name] = read_tensor(files, shard.file_name, name, header=header)
    assert placed.keys() == arrays.keys()
    for name, array in arrays.items():
        assert placed[name].shape == array.shape
        assert placed[name].dtype == array.dtype
        assert placed[name].tobytes() == array.tobytes()


def test_plan_follows_the_order_and_names_files_as_hugging_face_does():
    arrays = [np.zeros(size, np.uint8) for size in (4, 4, 20, 1, 1)]
    shards = plan_shards([source(f"t{i}", a) for i, a in enumerate(arrays)], 8)
    assert [[t.name for t in shard.tensors] for shard in shards] == [
        ["t0", "t1"], ["t2"], ["t3", "t4"],
    ]  # fmt: skip
    assert shards[0].file_name == "model-00001-of-00003.safetensors"
    assert [shard.nbytes for shard in shards] == [8, 20, 2]
    assert [shard.file_name for shard in plan_shards([], 8)] == ["model.safetensors"]


def test_plan_lists_every_problem_at_once():
    sources = [
        source("a", np.zeros(2, ml_dtypes.int4)),
        source("b", np.zeros(2)),
        source("b", np.zeros(2)),
        source("c", np.zeros(2, np.complex128)),
    ]
    with pytest.raises(UnsupportedLeafError) as caught:
        plan_shards(sources)
    for problem in ("a: int4", "b: twice", "c: complex128"):
        assert problem in str(caught.value)


def test_index_maps_every_tensor_to_its_file(files):
    shards = plan_shards([source(f"t{i}", np.zeros(4, np.uint8)) for i in range(4)], 8)
    write_index(files, "model.safetensors.index.json", shards)
    size = files.stat("model.safetensors.index.json").size
    index = json.loads(files.read_range("model.safetensors.index.json", 0, size))
    assert index == {
        "metadata": {"total_size": 16},
        "weight_map": {
            "t0": "model-00001-of-00002.safetensors",
            "t1": "model-00001-of-00002.safetensors",
            "t2": "model-00002-of-00002.safetensors",
            "t3": "model-00002-of-00002.safetensors",
        },
    }


def failing(name):
    def blocks(max_bytes):
        yield np.ones(writer.BLOCK_BYTES // 4, np.float32)
        raise RuntimeError("the disk under the source died")

    return TensorSource(name, (writer.BLOCK_BYTES,), np.dtype(np.float32), blocks)


def test_failing_source_leaves_nothing_visible(files):
    with pytest.raises(RuntimeError, match="died"):
        write_shard(files, "model.safetensors", single(failing("t")))
    assert files.walk() == []


def test_failing_write_keeps_the_file_that_was_there(files):
    write_shard(files, "x", single(source("old", np.arange(4))))

    def cancel(_):
        raise InterruptedError("cancelled")

    with pytest.raises(InterruptedError):
        write_shard(files, "x", single(source("new", np.arange(9))), on_bytes=cancel)
    assert list(read_header(files, "x").tensors) == ["old"]


@pytest.mark.parametrize(
    "given_array",
    [np.zeros((2, 3), np.float32), np.zeros((4, 3), np.float32), np.zeros((3, 3), np.float64)],
    ids=["too few", "too many", "other dtype"],
)
def test_blocks_that_do_not_add_up_are_refused_by_name(local, given_array):
    lying = TensorSource("w", (3, 3), np.dtype(np.float32), lambda _: iter([given_array]))
    with pytest.raises(StorageError, match=r"w: expected 36 bytes of float32\[3, 3\]"):
        write_shard(local, "x", single(lying))
    assert local.walk() == []


@pytest.mark.parametrize(
    ("tensors", "held", "most"), [(1, 0, 3), (4, 0, 5), (4, 2 << 10, 3), (40, 0, 2)]
)
def test_few_blocks_exist_at_once(local, monkeypatch, tensors, held, most):
    """Blocks that were made and not yet written are counted, while the writer stands still.

    Two large tensors are read at once, unless one holds much beside its blocks.
    """
    monkeypatch.setattr(writer, "BLOCK_BYTES", 1 << 10)
    count = 40
    made = 0
    written_when_made = []
    written = 0
    changed = threading.Condition()

    def blocks(max_bytes):
        nonlocal made
        for _ in range(count // tensors):
            with changed:
                made += 1
                written_when_made.append(written)
                changed.notify_all()
            yield np.zeros(1 << 10, np.uint8)

    def on_bytes(size):
        nonlocal written
        with changed:
            if size == 1 << 10:
                # Stand still until the readers have run as far ahead as they may at first, and
                # now and then give them the time to run further than that.
                changed.wait_for(lambda: made >= most)
                changed.wait(0.02)
                written += 1

    size = (count // tensors) << 10
    sources = [
        TensorSource(f"t{number:02}", (size,), np.dtype(np.uint8), blocks, held)
        for number in range(tensors)
    ]
    write_shard(local, "x", single(*sources), on_bytes=on_bytes)
    ahead = [
        number - done for number, done in zip(itertools.count(1), written_when_made, strict=False)
    ]
    assert max(ahead) == most
    assert most * writer.BLOCK_BYTES <= peak_bytes(single(*sources))


def test_small_tensors_keep_their_order_though_read_together(local):
    arrays = {f"t{i}": np.full(100, i, np.int32) for i in range(50)}
    write_shard(local, "x", single(*(source(n, a) for n, a in arrays.items())))
    assert list(read_header(local, "x").tensors) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read_tensor(local, "x", name), array)


def test_shard_without_tensors_is_a_valid_file(local, tmp_path):
    write_shard(local, "x", Shard("x", (), 0))
    assert safetensors.numpy.load_file(tmp_path / "out" / "x") == {}
