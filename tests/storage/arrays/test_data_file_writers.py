"""Files of every size reach a disk byte by byte, past its page cache or through it."""

import errno
import fcntl
import multiprocessing
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cairn import StoreUnavailableError, parse_uri
from cairn.storage.arrays.data_file_writers import (
    open_data_file_writer,
)
from cairn.storage.store.checksums import ContentSum
from tests.storage.open_files import files_open_below
from tests.storage.pieces import pieces
from tests.storage.seams import data_file_writers, deadlines, direct_io

MEMORY = 16 * 4096
SIZES = [0, 1, 4095, 4096, 4097, MEMORY - 1, MEMORY, MEMORY + 1, 3 * MEMORY, 3 * MEMORY + 4097]
DIRECT = os.O_DIRECT


@pytest.fixture(autouse=True)
def _small_memory(monkeypatch):
    monkeypatch.setattr(direct_io, "BUFFER_BYTES", MEMORY)
    monkeypatch.setattr(direct_io, "_free", queue.SimpleQueue())


@pytest.fixture
def calls(monkeypatch):
    """What `os.pwrite` was asked for: (whether past the page cache, how many bytes)."""
    made = []
    put = os.pwrite

    def write(descriptor, data, offset):
        made.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT), len(data)))
        return put(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    return made


def written(folder, content, cuts=()):
    """The file after `content` was written in parts that end at `cuts`."""
    sink = open_data_file_writer(parse_uri(folder))
    whole = memoryview(content)
    parts = [whole[a:b] for a, b in zip((0, *cuts), (*cuts, len(content)), strict=True)]
    try:
        summed = ContentSum()
        sink.write("d/file", pieces(parts), summed, len(content)).result()
    finally:
        sink.close()
    expected = ContentSum()
    expected.update(whole)
    assert summed.text() == expected.text()
    return Path(folder, "d", "file").read_bytes()


def numbers(size):
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("setting", ["1", "0"])
def test_files_of_any_size_hold_what_was_given(tmp_path, monkeypatch, size, setting):
    monkeypatch.setenv("CAIRN_DIRECT_IO", setting)
    content = numbers(size)
    assert written(tmp_path, content, cuts=(size // 3, size // 3, size // 2)) == content


def test_all_but_the_end_of_a_file_goes_past_the_page_cache(tmp_path, calls):
    content = numbers(2 * MEMORY + 4096 + 5)
    assert written(tmp_path, content) == content
    assert calls == [(True, MEMORY), (True, MEMORY), (True, 4096), (False, 5)]


def test_the_page_cache_is_used_if_asked_for(tmp_path, monkeypatch, calls):
    monkeypatch.setenv("CAIRN_DIRECT_IO", "0")
    assert written(tmp_path, content := numbers(2 * MEMORY + 5)) == content
    assert not any(direct for direct, _ in calls)


def test_a_file_system_that_cannot_go_past_its_page_cache_is_written_through_it(
    tmp_path, monkeypatch, calls
):
    control = fcntl.fcntl

    def refuse(descriptor, command, flags=0):
        if command == fcntl.F_SETFL and flags & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert written(tmp_path, content := numbers(2 * MEMORY + 5)) == content
    assert not any(direct for direct, _ in calls)


def test_a_file_system_with_another_alignment_is_written_through_its_page_cache(
    tmp_path, monkeypatch
):
    put = os.pwrite

    def write(descriptor, data, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return put(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    assert written(tmp_path, content := numbers(2 * MEMORY + 5)) == content


@pytest.mark.parametrize("at", ["pwrite", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_told_with_the_file_and_leaves_no_descriptor(
    tmp_path, monkeypatch, at, number
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, at, fail)
    with pytest.raises(OSError, match="file") as caught:
        written(tmp_path, numbers(2 * MEMORY))
    assert caught.value.errno == number
    assert files_open_below(tmp_path) == []


def test_a_file_that_exists_is_not_written_over(tmp_path):
    written(tmp_path, b"first")
    with pytest.raises(FileExistsError):
        written(tmp_path, b"second")
    assert (tmp_path / "d" / "file").read_bytes() == b"first"


def test_a_forked_child_writes_with_memory_of_its_own(tmp_path):
    """The parent's is not in it."""
    content = numbers(3 * MEMORY + 5)
    assert written(tmp_path / "parent", content) == content
    child = multiprocessing.get_context("fork").Process(
        target=written, args=(tmp_path / "child", content)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert (tmp_path / "child" / "d" / "file").read_bytes() == content


def test_no_more_buffers_are_filled_at_a_time_than_there_are_processors(tmp_path):
    filling, most = set(), 0

    def parts(number):
        nonlocal most
        for _ in range(6):
            filling.add(number)
            most = max(most, len(filling))
            time.sleep(0.001)
            filling.remove(number)
            yield bytes(MEMORY)

    sink = open_data_file_writer(parse_uri(tmp_path))
    threads = 4 * data_file_writers._MAX_FILLING
    with ThreadPoolExecutor(threads) as pool:
        written = [
            pool.submit(sink.write, f"d/{number}", pieces(parts(number)), ContentSum())
            for number in range(threads)
        ]
    for one in written:
        one.result().result()
    sink.close()
    assert 1 < most <= data_file_writers._MAX_FILLING


def test_buffers_are_filled_while_the_disk_writes_others(tmp_path, monkeypatch):
    monkeypatch.setattr(data_file_writers, "_filling", threading.BoundedSemaphore(1))
    at_the_disk, answers = threading.Event(), threading.Event()
    put = os.pwrite

    def write(descriptor, data, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("slow"):
            at_the_disk.set()
            assert answers.wait(60)
        return put(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    sink = open_data_file_writer(parse_uri(tmp_path))
    content = numbers(3 * MEMORY)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(sink.write, "d/slow", pieces([content]), ContentSum())
        assert at_the_disk.wait(60)
        sink.write("d/other", pieces([content]), ContentSum()).result()
        answers.set()
        slow.result().result()
    sink.close()
    assert (tmp_path / "d" / "other").read_bytes() == content
    assert (tmp_path / "d" / "slow").read_bytes() == content


def test_a_child_that_is_forked_while_buffers_are_filled_writes(tmp_path):
    for _ in range(data_file_writers._MAX_FILLING):
        data_file_writers._filling.acquire()
    try:
        child = multiprocessing.get_context("fork").Process(target=written, args=(tmp_path, b"it"))
        child.start()
        child.join(60)
        child.kill()
    finally:
        for _ in range(data_file_writers._MAX_FILLING):
            data_file_writers._filling.release()
    assert child.exitcode == 0
    assert (tmp_path / "d" / "file").read_bytes() == b"it"


AT_FIRST = data_file_writers.MAX_REMOTE_FILE_BYTES // data_file_writers.REMOTE_FILE_BYTES


@pytest.fixture
def sending(gcs):
    """Eight objects on their way to a store, and what holds the uploads back."""

    def send(kind):
        fault = gcs.faults.add(kind, operation="upload", count=None)
        sink = open_data_file_writer(parse_uri(f"{gcs.bucket_uri}/item"))
        pool = ThreadPoolExecutor(8)
        sent = [
            pool.submit(sink.write, f"d/{number}", pieces([b"value"]), ContentSum(), 5)
            for number in range(8)
        ]
        fault.wait(times=AT_FIRST)
        time.sleep(0.2)
        assert fault.fired == AT_FIRST
        return sink, fault, sent

    return send


def test_more_objects_are_sent_at_a_time_as_they_are_answered_soon(sending, gcs):
    sink, held, sent = sending("hold")
    held.release()
    for one in sent:
        one.result().result()
    assert len(gcs.names("item/d/")) == 8
    assert sink._window._wide == 8


def test_a_slow_line_brings_one_object_at_a_time(sending, monkeypatch):
    monkeypatch.setattr(data_file_writers, "_FAST_UPLOAD_SECONDS", 0)
    sink, held, sent = sending("hold")
    held.release()
    for one in sent:
        one.result().result()
    assert sink._window._wide == 1


def test_nothing_more_is_sent_to_a_store_that_does_not_answer(sending, monkeypatch):
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", 0.5)
    _, hung, sent = sending("hang")
    for one in sent:
        with pytest.raises(StoreUnavailableError):
            one.result().result()
    assert hung.fired == AT_FIRST
