"""Data files, as TensorStore reads them; and disks that are full, slow to take, or far away."""

import contextlib
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import StoreFullError, parse_uri
from cairn.state.checkpointing.leaf_forms import STORED_DTYPES
from cairn.storage.arrays.chunk_digests import ChunkDigests
from cairn.storage.arrays.data_file_writers import open_data_file_writer
from cairn.storage.arrays.data_files import ShardToWrite, shard_index, write_data_files
from cairn.storage.arrays.digests import box_digest
from cairn.storage.arrays.dtypes import dtype_named
from cairn.storage.arrays.four_bits import pack, packed_axis, unpack
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.errors import translate_error
from cairn.storage.store.checksums import ContentSum
from tests.multi_process.seams import tree_writer
from tests.storage.open_files import files_open_below
from tests.storage.parts import cuts
from tests.storage.seams import data_file_writers
from tests.storage.stored_arrays import assert_equal, held, numbers, read, write

DTYPES = sorted(STORED_DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensorstore_reads_what_was_written(tmp_path, dtype):
    scalar, vector = numbers((), dtype), numbers((24,), dtype, 1)
    matrix, block = numbers((12, 20), dtype, 2), numbers((4, 6, 10), dtype, 3)
    arrays = {
        "scalar": held(scalar, ((), ())),
        "a/vector": held(vector, ((12,), (4,))),
        "a/one": held(vector[:1], ((1,), (1,))),
        "rows": held(matrix, ((6, 20), (2, 20)), origins=(0, 6)),
        "squares": held(matrix, ((12, 20), (3, 5))),
        "b/c/block": held(block, ((2, 6, 10), (1, 3, 5))),
        "transposed": held(matrix.T, ((20, 12), (10, 12))),
        "every other": held(block[::2, :, ::-1], ((2, 6, 10), (1, 6, 10))),
        "columns": held(matrix[:, 4:14], ((12, 10), (4, 10))),
        "fortran": held(np.asfortranarray(matrix), ((12, 20), (12, 20))),
    }
    write(tmp_path, arrays)
    for path, array in arrays.items():
        assert_equal(read(tmp_path, path), np.concatenate([box.values for box in array.boxes])
                     if len(array.boxes) > 1 else array.boxes[0].values)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(case=cuts(), dtype=st.sampled_from(["float32", "bfloat16", "int8", "complex64"]))
def test_any_cut_is_read_back_and_digested_by_chunk(tmp_path_factory, case, dtype):
    shape, shard, chunk = case
    folder = tmp_path_factory.mktemp("cut")
    array = numbers(shape, dtype)
    files = write(folder, {"w": held(array, (shard, chunk))})
    assert_equal(read(folder, "w"), array)
    digests = ChunkDigests({"w": [box for file in files for _, box in file.boxes.values()]})
    assert digests.total("w") == box_digest(array, (0,) * array.ndim)
    for index in np.ndindex(*(size // step for size, step in zip(shape, chunk, strict=True))):
        low = tuple(at * step for at, step in zip(index, chunk, strict=True))
        box = tuple(slice(at, at + step) for at, step in zip(low, chunk, strict=True))
        assert digests.expected("w", chunk, index) == box_digest(array[box], low)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_packed_bytes_are_digested_as_the_elements_that_they_are(tmp_path, dtype):
    elements = numbers((8, 12), "int4").astype(np.int8) & (15 if dtype == "uint4" else -1)
    elements = elements.astype(dtype_named(dtype))
    packed = pack(elements, 1)
    forms = {"w": StoredForm("packed", elements.shape, dtype)}
    files = write(tmp_path, {"w": held(packed, ((4, 6), (2, 6)))}, forms)
    found = read(tmp_path, "w")
    assert_equal(unpack(found, dtype, packed_axis(elements.shape, packed.shape)), elements)
    digests = ChunkDigests({"w": [box for file in files for _, box in file.boxes.values()]})
    assert digests.total("w") == box_digest(elements, (0, 0))
    assert digests.expected("w", (2, 12), (3, 0)) == box_digest(elements[6:], (6, 0))


class Memory:
    """A sink that keeps the files, and writes one at a time."""

    writers = 1

    def __init__(self, limit):
        self.file_bytes, self.files = limit, {}

    def write(self, name, pieces, content, expected):
        parts = []
        with contextlib.suppress(StopIteration):
            size = next(pieces)
            while True:
                parts.append(bytearray(size))
                size = pieces.send(memoryview(parts[-1]))
        self.files[name] = b"".join(parts)
        content.update(self.files[name])
        done = Future()
        done.set_result(None)
        return done


def test_file_sizes_and_checksums_are_those_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file_writers, "FILE_BYTES", 3000)
    arrays = {f"w{number}": held(numbers((8, 32), "float32", number), ((2, 32), (1, 32)))
              for number in range(12)}  # fmt: skip
    files = write(tmp_path, arrays)
    assert len(files) > 4
    for file in files:
        content = (tmp_path / file.record.name).read_bytes()
        assert file.record.size == len(content)
        assert file.record.crc32c == f"{google_crc32c.value(content):08x}"
        again = ContentSum()
        again.update(content)
        assert file.record.content == again.text()
        # Nothing but values: they lie one after another, from the first byte to the last.
        refs = sorted(file.refs.values(), key=lambda ref: ref.offset)
        ends = [0, *(ref.offset + ref.length for ref in refs)]
        assert ends == [*(ref.offset for ref in refs), len(content)]
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("d/*")}
    assert names == {file.record.name for file in files}


def test_files_stay_below_the_limit_unless_one_value_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file_writers, "FILE_BYTES", 2000)
    small = {f"s{number}": held(numbers((100,), "float32", number), ((50,), (50,)))
             for number in range(9)}  # fmt: skip
    large = numbers((1000,), "float32", 9)
    files = write(tmp_path, {**small, "large": held(large, ((1000,), (250,)))})
    sizes = {len(file.refs): [] for file in files}
    for file in files:
        sizes[len(file.refs)].append(file.record.size)
        assert file.record.size <= 2000 or len(file.refs) == 1
    assert any(size > 2000 for size in sizes[1])
    assert len(files) < sum(len(file.refs) for file in files)
    assert_equal(read(tmp_path, "large"), large)


@pytest.mark.parametrize(("shape", "chunk"), [((), ()), ((6,), (2,)), ((4, 6), (4, 3))])
def test_the_length_of_a_value_is_known_before_it_is_written(shape, chunk):
    shard = ShardToWrite(b"k", "w", np.ones(shape, np.float32), (0,) * len(shape), chunk)
    sink = Memory(limit=1)
    (file,) = write_data_files(sink, [shard])
    content = sink.files[file.record.name]
    assert file.refs[b"k"].length == file.record.size == len(content) == shard.stored_bytes
    assert content.endswith(shard_index(shape, chunk, 4))


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_what_a_disk_does_not_take_at_once_is_written_again(tmp_path, monkeypatch, most):
    array = numbers((8, 30), "float32")
    put = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: put(file, data[:most], at))
    (file,) = write(tmp_path, {"w": held(array, ((4, 30), (2, 30)))})
    assert_equal(read(tmp_path, "w"), array)
    content = (tmp_path / file.record.name).read_bytes()
    assert file.record.crc32c == f"{google_crc32c.value(content):08x}"


def no_new_threads(before):
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.fixture
def _small_files():
    """RLIMIT_FSIZE makes every write beyond it fail with EFBIG, as a quota would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("_small_files")
def test_a_full_disk_is_an_error_and_leaves_no_thread_and_no_open_file(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file_writers, "FILE_BYTES", 256 << 10)
    before = threading.enumerate()
    arrays = {f"w{number}": held(numbers((1 << 15,), "float32"), ((1 << 15,), (1 << 12,)))
              for number in range(16)}  # fmt: skip
    with pytest.raises(OSError, match="File too large") as caught:
        write(tmp_path, arrays)
    assert isinstance(translate_error(caught.value, path=tmp_path), StoreFullError)
    assert not no_new_threads(before)
    assert files_open_below(tmp_path) == []


def test_a_disk_that_fails_to_sync_is_an_error_that_no_file_hides(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file_writers, "FILE_BYTES", 1000)
    calls = []

    def failing(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    before = threading.enumerate()
    arrays = {f"w{number}": held(numbers((200,), "float32"), ((200,), (200,)))
              for number in range(8)}  # fmt: skip
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, arrays)
    assert not no_new_threads(before)


def test_every_file_is_synced_before_the_write_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file_writers, "FILE_BYTES", 1000)
    synced = set()
    fsync = os.fsync

    def remember(descriptor):
        fsync(descriptor)
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", remember)
    arrays = {f"w{number}": held(numbers((200,), "float32"), ((200,), (200,)))
              for number in range(8)}  # fmt: skip
    sink = open_data_file_writer(parse_uri(tmp_path))
    files = write_data_files(sink, tree_writer.shards_of(arrays, {}))
    assert {Path(file.record.name).name for file in files} <= synced
    sink.close()


def test_a_write_that_is_told_to_stop_writes_no_more_files(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file_writers, "FILE_BYTES", 1000)
    arrays = {f"w{number}": held(numbers((200,), "float32"), ((200,), (200,)))
              for number in range(8)}  # fmt: skip
    sink = open_data_file_writer(parse_uri(tmp_path))
    assert write_data_files(sink, tree_writer.shards_of(arrays, {}), stopped=lambda: True) == []
    sink.close()
    assert not list(tmp_path.glob("d/*"))


def test_nothing_to_write_is_no_file(tmp_path):
    sink = open_data_file_writer(parse_uri(tmp_path))
    assert write_data_files(sink, []) == []
    sink.close()


def test_objects_of_a_store_are_written_whole(gcs, monkeypatch):
    monkeypatch.setattr(data_file_writers, "REMOTE_FILE_BYTES", 4000)
    folder = parse_uri(gcs.bucket_uri) / "item"
    arrays = {f"w{number}": held(numbers((16, 30), "bfloat16", number), ((8, 30), (2, 30)))
              for number in range(9)}  # fmt: skip
    gcs.faults.add("status", status=503, count=2, operation=r".*(insert|upload).*", name="item/d/")
    files = write(folder, arrays)
    assert len(files) > 2
    base = ts.KvStore.open(folder.kvstore_spec()).result()
    for file in files:
        content = base[file.record.name]
        assert (len(content), f"{google_crc32c.value(content):08x}") == (
            file.record.size,
            file.record.crc32c,
        )
    for path, array in arrays.items():
        assert_equal(read(folder, path), array.boxes[0].values)


WRITE_AND_MEASURE = """
import sys
import numpy as np
from benchmarks.storage_memory import PeakMemory
from cairn.storage.store.uri import parse_uri
from cairn.storage.arrays.data_files import ShardToWrite, write_data_files
from cairn.storage.arrays.data_file_writers import open_data_file_writer

megabyte = np.ones(1 << 18, np.float32)
sink = open_data_file_writer(parse_uri(sys.argv[1]))

def write(shards):
    write_data_files(
        sink,
        [
            ShardToWrite(b"%d" % number, "w", megabyte, (number * megabyte.size,), megabyte.shape)
            for number in range(shards)
        ],
    )

write(4)
memory = PeakMemory()
write(int(sys.argv[2]))
print(memory.extra >> 20)
sink.close()
"""


def test_memory_of_an_upload_holds_what_is_on_its_way_and_no_more(gcs):
    uri = f"{gcs.bucket_uri}/item"
    done = subprocess.run(
        [sys.executable, "-c", WRITE_AND_MEASURE, uri, "192"],
        env={**os.environ, **gcs.env, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    on_its_way = 8 * data_file_writers.REMOTE_FILE_BYTES >> 20
    assert int(done.stdout) < 2 * on_its_way


def test_a_store_that_refuses_is_an_error_and_leaves_no_thread(gcs):
    gcs.faults.add("status", status=403, count=None, operation=r".*(insert|upload).*")
    sink = open_data_file_writer(parse_uri(gcs.bucket_uri) / "item")
    before = threading.enumerate()
    arrays = {"w": held(numbers((16, 30), "float32"), ((8, 30), (2, 30)))}
    with pytest.raises(Exception, match="403"):
        write_data_files(sink, tree_writer.shards_of(arrays, {}))
    sink.close()
    assert not no_new_threads(before)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=30), limit=st.integers(1, 3000))
def test_files_hold_every_shard_once_and_in_order(sizes, limit):
    shards = [
        ShardToWrite(b"%d" % number, "w", np.zeros(size, np.float32), (number,), (size,))
        for number, size in enumerate(sizes)
    ]
    lengths = {shard.key: shard.stored_bytes for shard in shards}
    files = write_data_files(Memory(limit), shards)
    assert [key for file in files for key in file.refs] == [*lengths]
    for file in files:
        assert file.record.size == sum(lengths[key] for key in file.refs)
        assert file.record.size <= limit or len(file.refs) == 1
