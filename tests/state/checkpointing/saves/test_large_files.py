"""The larger an item is, the larger its files; on a bucket these are sent as a stream."""

import threading
import time

import numpy as np
import pytest

from cairn import Checkpointer, DedupPolicy, SaveError, parse_uri
from cairn.state.checkpointing.modules import TreePlan
from cairn.state.checkpointing.save_options import SaveOptions
from cairn.storage.arrays.data_file_writers import open_data_file_writer
from tests.faults.report import is_long
from tests.state.seams import (
    MAX_FILE_BYTES,
    MAX_REMOTE_FILE_BYTES,
    Dedup,
    HostTrees,
    data_file_writers,
    prepare,
)
from tests.storage.pieces import pieces

GIB = 1 << 30


def file_bytes(uri, item_bytes):
    sink = open_data_file_writer(uri, item_bytes=item_bytes)
    sink.close()
    return sink.file_bytes


def test_an_item_of_any_size_has_some_thousand_files(some_root_uri):
    least = file_bytes(some_root_uri, 0)
    sizes = [file_bytes(some_root_uri, size) for size in (GIB, 10 * GIB, 1000 * GIB, 5000 * GIB)]
    assert least == sizes[0] <= sizes[1] < sizes[2] < sizes[3] == MAX_FILE_BYTES
    assert 10 * GIB / sizes[1] <= 1001
    assert 1000 * GIB / sizes[2] == pytest.approx(4000, rel=0.01)


@pytest.fixture
def small(monkeypatch):
    """A bucket's objects grow from 64 KiB on, and an item has about two."""
    monkeypatch.setattr(data_file_writers, "REMOTE_FILE_BYTES", 64 << 10)
    monkeypatch.setattr(data_file_writers, "MAX_REMOTE_FILE_BYTES", 64 << 10)
    monkeypatch.setattr(data_file_writers, "FILE_BYTES", 64 << 10)
    monkeypatch.setattr(data_file_writers, "_FILES_OF_ITEM", 2)


@pytest.fixture
def tree():
    numbers = np.random.default_rng(0)
    return {f"{one}": numbers.random((64, 1000), np.float32) for one in range(20)}


def test_a_step_of_large_files_is_read_back_bit_for_bit(some_root_uri, small, tree, monkeypatch):
    monkeypatch.setattr(data_file_writers, "BLOCK_BYTES", 300 << 10)
    with Checkpointer(some_root_uri / "run", writer_id="job") as checkpointer:
        handle = checkpointer.save(1, {"model": tree})
        handle.wait()
        found = checkpointer.restore({"model": tree})
    for path, values in tree.items():
        np.testing.assert_array_equal(found["model"][path], values)


def test_a_bucket_has_few_objects_of_a_large_item(gcs, small, tree):
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as checkpointer:
        checkpointer.save(1, {"model": tree}).wait()
    assert len(gcs.names("run/attempts/1/1/model/d/")) <= 3  # of twenty leaves


def test_a_large_object_that_can_not_be_sent_fails_the_save(gcs, small, tree):
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as checkpointer:
        checkpointer.save(1, {"model": {"a": np.zeros(3)}}).wait()
        refused = gcs.faults.add("status", status=403, count=None, operation="upload", name="/d/")
        handle = checkpointer.save(2, {"model": tree})
        with pytest.raises(SaveError, match="refused access"):
            handle.wait()
        assert refused.fired
        gcs.faults.clear()
        assert checkpointer.steps() == [1]


@pytest.mark.parametrize("skip", range(4) if is_long() else [0, 2])
def test_a_large_object_is_sent_again_from_where_the_store_lost_it(gcs, small, tree, skip):
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as checkpointer:
        lost = gcs.faults.add("status", status=503, operation="upload", name="/d/", skip=skip)
        checkpointer.save(1, {"model": tree}).wait()
        assert lost.fired
        found = checkpointer.restore({"model": tree})
    for path, values in tree.items():
        np.testing.assert_array_equal(found["model"][path], values)


def test_blocks_are_what_the_buffers_are_one_after_another(monkeypatch):
    monkeypatch.setattr(data_file_writers, "BLOCK_BYTES", 7)
    numbers = np.random.default_rng(1)
    for _ in range(100):
        buffers = [numbers.bytes(size) for size in numbers.integers(0, 20, 8)]
        blocks = list(data_file_writers._blocks(pieces(buffers)))
        assert b"".join(blocks) == b"".join(buffers)
        assert all(len(block) == 7 for block in blocks[:-1])
        assert all(0 < len(block) <= 7 for block in blocks)


def test_small_items_are_put_together_in_memory_as_ever(gcs):
    sink = open_data_file_writer(
        parse_uri(f"{gcs.bucket_uri}/item"), item_bytes=4000 * MAX_REMOTE_FILE_BYTES
    )
    assert isinstance(sink, data_file_writers._ObjectWriter)
    sink.close()


def test_threads_that_describe_the_items_of_a_save_do_it_once():
    """What writes them may begin while the thread of the save is still at it."""
    _, items = prepare(
        1,
        {"model": {"a": np.zeros(3)}, "optimizer": {"b": np.zeros(3)}},
        SaveOptions(),
        plan=TreePlan(),
        dedup=lambda _: Dedup(DedupPolicy(), time.time, lambda steps: ()),
    )

    class Slow(Dedup):
        def same(self, leaves):
            time.sleep(0.1)
            return super().same(leaves)

    held = HostTrees(items, lambda _: Slow(DedupPolicy(), time.time, lambda steps: ()), None)
    found, errors = [], []

    def describe():
        try:
            found.append([*held.items()])
        except Exception as exc:
            errors.append(exc)

    threads = [threading.Thread(target=describe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [[name for name, _ in one] for one in found] == [["model", "optimizer"]] * 4
    assert len(held.records) == 2
