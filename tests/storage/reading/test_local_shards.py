"""Reads of stored shards into place: any part, and nothing that is not what was saved."""

import math
import os
import random
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import CorruptionError, parse_uri
from cairn.storage.arrays.box_buffers import BoxBuffer, aligned_empty, grid_overlaps
from cairn.storage.arrays.chunk_digests import ChunkDigests
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_files import CRC_BYTES
from cairn.storage.reading.local_shards import LocalShards, StoredCut, WholeChunk
from tests.storage.open_files import files_open_below
from tests.storage.parts import boxes, cuts, inside
from tests.storage.stored_arrays import assert_equal, held, numbers, write


class Item:
    """A database of arrays, and how to read them past TensorStore."""

    def __init__(self, folder: Path, arrays):
        """Of these (array, outer shard, inner chunk) by path."""
        self.folder = folder
        self.arrays = {path: array for path, (array, _, _) in arrays.items()}
        self.cuts = {path: ChunkShapes(shard, chunk) for path, (_, shard, chunk) in arrays.items()}
        files = write(
            folder, {path: held(array, self.cuts[path]) for path, array in self.arrays.items()}
        )
        boxes = {path: [] for path in arrays}
        for file in files:
            for path, box in file.boxes.values():
                boxes[path].append(box)
        self.digests = ChunkDigests(boxes)
        self.refs = {key: ref for file in files for key, ref in file.refs.items()}

    def cut(self, path):
        chunk = self.cuts[path].chunk
        return StoredCut(
            name=path.replace("/", "."),
            dtype=self.arrays[path].dtype,
            cut=self.cuts[path],
            expected=lambda index: self.digests.expected(path, chunk, index),
            where=f"step/model: {path}",
        )

    def read(self, path, parts=None, local=None):
        """The (origin, shape) parts of an array, read into new memory; the whole by default."""
        array = self.arrays[path]
        parts = parts or [((0,) * array.ndim, array.shape)]
        memory = aligned_empty([shape for _, shape in parts], array.dtype)
        regions = [BoxBuffer(at, one) for (at, _), one in zip(parts, memory, strict=True)]
        shards = local or LocalShards(parse_uri(self.folder))
        shard = self.cuts[path].shard
        for origin, touching in grid_overlaps(shard, regions):
            shards.read(self.cut(path), origin, touching)
        return memory


@st.composite
def cases(draw):
    shape, shard, chunk = draw(cuts())
    return shape, shard, chunk, draw(st.lists(boxes(shape), min_size=1, max_size=4))


@settings(max_examples=80, deadline=None)
@given(case=cases(), dtype=st.sampled_from(["float32", "bfloat16", "bool", "int4", "complex64"]))
def test_any_parts_of_any_cut_are_what_was_written(tmp_path_factory, case, dtype):
    shape, shard, chunk, parts = case
    item = Item(tmp_path_factory.mktemp("item"), {"a/w": (numbers(shape, dtype), shard, chunk)})
    for found, (origin, part) in zip(item.read("a/w", parts), parts, strict=True):
        assert_equal(found, item.arrays["a/w"][(*inside(origin, part), ...)])


def device_parts(shape, counts):
    """What each device of a grid of `counts` holds."""
    part = tuple(size // count for size, count in zip(shape, counts, strict=True))
    return [
        (tuple(at * step for at, step in zip(index, part, strict=True)), part)
        for index in np.ndindex(*counts)
    ]


@pytest.mark.parametrize(
    ("shard", "chunk"),
    [((24, 16), (8, 16)), ((6, 16), (3, 8)), ((24, 4), (24, 4)), ((12, 8), (4, 4))],
)
@pytest.mark.parametrize("counts", [(1, 1), (8, 1), (1, 8), (4, 2), (3, 1), (2, 4), (24, 16)])
def test_what_one_sharding_wrote_another_reads(tmp_path, shard, chunk, counts):
    """Rows, columns and grids; parts that do not end where chunks do."""
    item = Item(tmp_path, {"w": (numbers((24, 16), "float32"), shard, chunk)})
    parts = device_parts((24, 16), counts)
    for found, (origin, part) in zip(item.read("w", parts), parts, strict=True):
        assert_equal(found, np.ascontiguousarray(item.arrays["w"][inside(origin, part)]))


def test_an_array_without_axes_is_read(tmp_path):
    item = Item(tmp_path, {"s": (np.float64(2.5).reshape(()), (), ())})
    (found,) = item.read("s")
    assert (found.shape, float(found)) == ((), 2.5)


def test_many_threads_read_one_item(tmp_path):
    arrays = {f"w{n}": (numbers((64, 8), "float32", n), (8, 8), (2, 8)) for n in range(6)}
    item = Item(tmp_path, arrays)
    local = LocalShards(parse_uri(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        reads = {path: pool.submit(item.read, path, None, local) for path in arrays for _ in "ab"}
    for path, read in reads.items():
        assert_equal(read.result()[0], item.arrays[path])


def test_an_item_of_more_files_than_may_be_open_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "cairn.storage.arrays.data_file_writers.FILE_BYTES", 1
    )  # a file for each shard
    item = Item(tmp_path, {"w": (numbers((64, 8), "float32"), (1, 8), (1, 8))})
    assert len(list(tmp_path.rglob("d/*"))) == 64
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, old[1]))
    try:
        (found,) = item.read("w")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
    assert_equal(found, item.arrays["w"])
    assert not files_open_below(tmp_path)


@pytest.mark.parametrize("most", [1, 50, 10_000])
def test_what_a_disk_does_not_give_at_once_is_asked_for_again(tmp_path, monkeypatch, most):
    item = Item(tmp_path, {"w": (numbers((16, 8), "float32"), (8, 8), (2, 8))})
    preadv = os.preadv

    def short(file, buffers, offset):
        given, left = [], most
        for buffer in buffers:
            given.append(memoryview(buffer).cast("B")[:left])
            left -= len(given[-1])
        return preadv(file, given, offset)

    monkeypatch.setattr(os, "preadv", short)
    assert_equal(item.read("w")[0], item.arrays["w"])


@pytest.fixture
def item(tmp_path):
    """Two leaves of one layout and other values; several shards of several chunks."""
    return Item(
        tmp_path / "item",
        {
            "a/one": (numbers((12, 6), "float32", 1), (6, 6), (2, 6)),
            "a/two": (numbers((12, 6), "float32", 2), (6, 6), (2, 6)),
        },
    )


def assert_refused(item, path):
    """Reading raises, and names the leaf; whole, and in parts."""
    rows, columns = item.arrays[path].shape
    for parts in (
        None,
        device_parts((rows, columns), (1, columns)),
        device_parts((rows, columns), (3, 1)),
    ):
        with pytest.raises(CorruptionError, match=rf"step/model: {path}"):
            item.read(path, parts)


def damaged(file, offset, bit):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1 << bit
    file.write_bytes(content)


def value_of(item, key):
    ref = item.refs[key]
    return item.folder / ref.file, ref.offset, ref.length


def test_every_flipped_bit_of_a_value_is_an_error(item):
    """In the data, in the checksum of a chunk, in the index of the shard: each byte of it."""
    file, start, length = value_of(item, b"a.one/c/1/0")
    whole = file.read_bytes()
    rng = random.Random(0)
    chunk = math.prod(item.cuts["a/one"].chunk) * 4 + CRC_BYTES
    for offset in range(length):
        if offset % 3 and chunk - CRC_BYTES <= offset % chunk and offset < 3 * chunk:
            continue  # a third of the checksums' bytes will do
        damaged(file, start + offset, rng.randrange(8))
        with pytest.raises(CorruptionError, match=r"step/model: a/one, chunk \["):
            item.read("a/one")
        assert_equal(item.read("a/two")[0], item.arrays["a/two"])
        file.write_bytes(whole)
    assert_equal(item.read("a/one")[0], item.arrays["a/one"])


def test_a_flipped_bit_is_an_error_for_every_part_of_its_chunk_and_names_it(item):
    file, start, _ = value_of(item, b"a.one/c/1/0")
    chunk = math.prod(item.cuts["a/one"].chunk) * 4 + CRC_BYTES
    damaged(file, start + 2 * chunk + 5, 0)
    for part in (((10, 0), (1, 1)), ((11, 5), (1, 1)), ((0, 2), (12, 1)), ((10, 0), (2, 6))):
        with pytest.raises(CorruptionError, match=r"a/one, chunk \[5, 0\]: expected crc32c"):
            item.read("a/one", [part])
    (found,) = item.read("a/one", [((0, 0), (10, 6))])
    assert_equal(found, item.arrays["a/one"][:10])


def test_a_chunk_in_another_place_is_an_error_although_its_checksum_is_right(item):
    file, start, _ = value_of(item, b"a.one/c/0/0")
    chunk = math.prod(item.cuts["a/one"].chunk) * 4 + CRC_BYTES
    content = bytearray(file.read_bytes())
    one, two = (slice(start + at * chunk, start + (at + 1) * chunk) for at in (0, 2))
    content[one], content[two] = content[two], content[one]
    file.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"a/one, chunk \[0, 0\]: expected digest"):
        item.read("a/one")
    with pytest.raises(CorruptionError, match=r"a/one, chunk \[2, 0\]: expected digest"):
        item.read("a/one", [((4, 0), (1, 6))])
    (found,) = item.read("a/one", [((2, 0), (2, 6))])
    assert_equal(found, item.arrays["a/one"][2:4])


def test_values_of_equal_layout_that_changed_places_are_errors(item):
    (one, start, length), (two, other, _) = (
        value_of(item, key) for key in (b"a.one/c/0/0", b"a.two/c/0/0")
    )
    first, second = bytearray(one.read_bytes()), bytearray(two.read_bytes())
    values = bytes(first[start : start + length]), bytes(second[other : other + length])
    for file, at, value in ((one, start, values[1]), (two, other, values[0])):
        content = bytearray(file.read_bytes())
        content[at : at + length] = value
        file.write_bytes(content)
    for path in item.arrays:
        with pytest.raises(CorruptionError, match=rf"{path}, chunk \[0, 0\]: expected digest"):
            item.read(path)


@pytest.mark.parametrize("left", [0, 1, 40, -1])
def test_a_file_cut_short_is_an_error(item, left):
    file, start, length = value_of(item, b"a.two/c/1/0")
    os.truncate(file, start + (left if left >= 0 else length + left))
    assert_refused(item, "a/two")


def test_a_missing_file_is_an_error(item):
    file, _, _ = value_of(item, b"a.one/c/0/0")
    file.unlink()
    with pytest.raises(CorruptionError, match=rf"step/model: a/one: expected d/{file.name}"):
        item.read("a/one")


def test_a_shard_that_the_index_does_not_name_is_an_error(item):
    item.arrays["a/three"], item.cuts["a/three"] = item.arrays["a/one"], item.cuts["a/one"]
    with pytest.raises(CorruptionError, match=r"step/model: a/three.* a stored shard, found none"):
        item.read("a/three")


def test_a_shard_of_another_length_is_an_error(item):
    item.cuts["a/one"] = ChunkShapes((6, 6), (3, 6))
    with pytest.raises(CorruptionError, match=r"expected a shard of \d+ bytes, found \d+ bytes"):
        item.read("a/one")


def test_a_chunk_without_a_digest_is_an_error(item):
    item.digests = ChunkDigests()
    with pytest.raises(CorruptionError, match="expected digest None"):
        item.read("a/one")


@pytest.mark.parametrize("name", ["manifest.ocdbt", "b/node"])
def test_a_damaged_or_missing_index_is_an_error(item, name):
    whole = (item.folder / name).read_bytes()
    for offset in (5, len(whole) // 2, len(whole) - 1):
        damaged(item.folder / name, offset, 3)
        with pytest.raises(CorruptionError, match=r"index of an item's arrays"):
            item.read("a/one")
        (item.folder / name).write_bytes(whole)
    (item.folder / name).unlink()
    with pytest.raises(CorruptionError, match=r"index of an item's arrays"):
        item.read("a/one")


# Many small chunks that are read together.

SMALL = {
    "a/bias": ((6,), "float32"),
    "b": ((), "float64"),
    "c/kernel": ((3, 5), "int8"),
    "d": ((7, 2), "complex64"),
    "e": ((1, 1, 9), "bool"),
}


@pytest.fixture
def small(tmp_path):
    """Leaves of one chunk each."""
    arrays = {
        path: numbers(shape, dtype, seed)
        for seed, (path, (shape, dtype)) in enumerate(SMALL.items())
    }
    return Item(
        tmp_path / "item",
        {path: (array, array.shape, array.shape) for path, array in arrays.items()},
    )


def read_together(item, paths=SMALL):
    """The leaves, read in one go."""
    memory = {path: np.empty_like(item.arrays[path]) for path in paths}
    LocalShards(parse_uri(item.folder)).read_whole(
        [
            WholeChunk(item.cut(path), BoxBuffer((0,) * values.ndim, values))
            for path, values in memory.items()
        ]
    )
    return memory


@pytest.mark.parametrize("file_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("gap", [0, 1 << 20])
def test_many_leaves_read_together_are_what_was_saved(tmp_path, monkeypatch, file_bytes, gap):
    """In one file or in several, whether they lie together or apart, in any order."""
    monkeypatch.setattr("cairn.storage.arrays.data_file_writers.FILE_BYTES", file_bytes)
    monkeypatch.setattr("cairn.storage.reading.local_shards._GAP_BYTES", gap)
    shapes = [(n % 5 + 1, n % 3 + 1) for n in range(40)]
    arrays = {f"w{n}": numbers(shape, "float32", n) for n, shape in enumerate(shapes)}
    item = Item(tmp_path, {path: (one, one.shape, one.shape) for path, one in arrays.items()})
    for paths in (list(arrays), list(arrays)[::-3], ["w7"]):
        for path, found in read_together(item, paths).items():
            assert_equal(found, arrays[path])


def test_every_flipped_bit_of_leaves_read_together_is_an_error_that_names_the_leaf(small):
    rng = random.Random(0)
    for key, ref in small.refs.items():
        path = next(path for path in SMALL if key.decode().startswith(path.replace("/", ".")))
        file = small.folder / ref.file
        whole = file.read_bytes()
        for offset in range(ref.offset, ref.offset + ref.length):
            damaged(file, offset, rng.randrange(8))
            with pytest.raises(CorruptionError, match=rf"step/model: {path}, chunk \["):
                read_together(small)
            others = [other for other in SMALL if other != path]
            for other, found in read_together(small, others).items():
                assert_equal(found, small.arrays[other])
            file.write_bytes(whole)


def test_leaves_read_together_that_are_cut_short_missing_or_unknown_are_errors(small):
    ref = max(small.refs.values(), key=lambda ref: ref.offset)
    file = small.folder / ref.file
    whole = file.read_bytes()
    for left in (ref.offset, ref.offset + 1, ref.offset + ref.length - 1):
        file.write_bytes(whole[:left])
        with pytest.raises(CorruptionError, match=r"step/model: .* before the end"):
            read_together(small)
    file.unlink()
    with pytest.raises(CorruptionError, match=rf"expected d/{file.name}"):
        read_together(small)
    file.write_bytes(whole)
    small.digests = ChunkDigests()
    with pytest.raises(CorruptionError, match="expected digest None"):
        read_together(small)


def test_leaves_of_one_shape_that_changed_places_are_errors_when_read_together(tmp_path):
    arrays = {path: (numbers((4, 2), "float32", n), (4, 2), (4, 2)) for n, path in enumerate("pq")}
    item = Item(tmp_path / "item", arrays)
    one, two = item.refs[b"p/c/0/0"], item.refs[b"q/c/0/0"]
    contents = {ref: (item.folder / ref.file).read_bytes() for ref in (one, two)}
    for ref, other in ((one, two), (two, one)):
        content = bytearray((item.folder / ref.file).read_bytes())
        content[ref.offset : ref.offset + ref.length] = contents[other][
            other.offset : other.offset + other.length
        ]
        (item.folder / ref.file).write_bytes(content)
    with pytest.raises(CorruptionError, match=r"chunk \[0, 0\]: expected digest"):
        read_together(item, "pq")
