"""Files of every size reach the disk past its page cache, or through it, and are read back."""

import errno
import fcntl
import os
import queue
import threading

import google_crc32c
import numpy as np
import pytest

from cairn import StorageError, StoreFullError, open_files, parse_uri
from cairn.storage.store.disk import direct_writes
from cairn.storage.store.disk.direct_io import DISK_ALIGNMENT
from tests.storage.seams import direct_io

MEMORY = 16 * DISK_ALIGNMENT
SMALL = 2 * DISK_ALIGNMENT
SIZES = [0, 1, SMALL - 1, SMALL, MEMORY - 1, MEMORY, MEMORY + 1, 5 * MEMORY, 9 * MEMORY + 777]


@pytest.fixture(autouse=True)
def _small_memory(monkeypatch):
    monkeypatch.setattr(direct_io, "BUFFER_BYTES", MEMORY)
    monkeypatch.setattr(direct_io, "_DIRECT_BYTES", DISK_ALIGNMENT)
    monkeypatch.setattr(direct_io, "_free", queue.SimpleQueue())
    monkeypatch.setattr(direct_writes, "_SMALL_BYTES", SMALL)


@pytest.fixture
def puts(monkeypatch):
    """What the system was asked for: (whether past the page cache, from where, how many bytes)."""
    made = []
    put = os.pwrite

    def pwrite(descriptor, data, offset):
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        made.append((direct, offset, len(data)))
        return put(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return made


def numbers(size):
    return np.random.default_rng(size).bytes(size)


def writer(folder, *, read_back=False):
    return open_files(parse_uri(folder)).open_write("file", read_back=read_back)


def write(folder, content, *, cuts=(), read_back=False):
    """The writer, after it wrote `content` in parts that end at `cuts`."""
    with writer(folder, read_back=read_back) as sink:
        for start, end in zip((0, *cuts), (*cuts, len(content)), strict=True):
            assert sink.write(content[start:end]) == end - start
    return sink


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("setting", ["1", "0"])
@pytest.mark.parametrize("read_back", [True, False])
def test_a_file_of_any_size_holds_what_was_given(tmp_path, monkeypatch, size, setting, read_back):
    monkeypatch.setenv("CAIRN_DIRECT_IO", setting)
    content = numbers(size)
    sink = write(tmp_path, content, cuts=(size // 7, size // 2, size // 2), read_back=read_back)
    assert (tmp_path / "file").read_bytes() == content
    assert sink.read_back == (f"{google_crc32c.value(content):08x}" if read_back else None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_all_but_the_end_of_a_file_goes_past_the_page_cache(tmp_path, puts):
    write(tmp_path, numbers(2 * MEMORY + DISK_ALIGNMENT + 5))
    assert puts == [
        (True, 0, MEMORY),
        (True, MEMORY, MEMORY),
        (True, 2 * MEMORY, DISK_ALIGNMENT),
        (False, 2 * MEMORY + DISK_ALIGNMENT, 5),
    ]


def test_a_small_file_goes_through_the_page_cache_in_one_piece(tmp_path, puts):
    write(tmp_path, numbers(SMALL - 1), cuts=(1, 2, 3))
    assert puts == [(False, 0, SMALL - 1)]


def test_what_was_given_can_be_changed_at_once(tmp_path):
    memory = bytearray(MEMORY // 2)
    with writer(tmp_path) as sink:
        for number in range(20):
            memory[:] = bytes([number]) * len(memory)
            sink.write(memory)
        memory[:] = b"x" * len(memory)
    expected = b"".join(bytes([number]) * len(memory) for number in range(20))
    assert (tmp_path / "file").read_bytes() == expected


@pytest.mark.parametrize("refuses", ["the flag", "the alignment"])
def test_a_file_system_that_cannot_go_past_its_page_cache_is_written_through_it(
    tmp_path, monkeypatch, refuses
):
    control, put = fcntl.fcntl, os.pwrite

    def fcntl_(descriptor, command, flags=0):
        if refuses == "the flag" and command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, flags)

    def pwrite(descriptor, data, offset):
        if control(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return put(descriptor, data, offset)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    content = numbers(5 * MEMORY + 5)
    sink = write(tmp_path, content, read_back=True)
    assert (tmp_path / "file").read_bytes() == content
    assert sink.read_back == f"{google_crc32c.value(content):08x}"


def test_what_the_page_cache_takes_is_sent_on_its_way_before_the_file_is_whole(
    tmp_path, monkeypatch
):
    asked = []
    real = direct_writes._write_out
    monkeypatch.setattr(
        direct_writes, "_write_out", lambda *args: (asked.append(args[1:]), real(*args))
    )
    monkeypatch.setattr(direct_writes, "_WRITE_OUT_BYTES", 2 * MEMORY)
    monkeypatch.setenv("CAIRN_DIRECT_IO", "0")
    write(tmp_path, content := numbers(5 * MEMORY + 5))
    assert asked == [(0, 2 * MEMORY), (2 * MEMORY, 4 * MEMORY)]
    assert (tmp_path / "file").read_bytes() == content


def test_where_the_system_has_no_such_call_files_are_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_writes, "_sync_file_range", lambda: None)
    monkeypatch.setattr(direct_writes, "_WRITE_OUT_BYTES", MEMORY)
    monkeypatch.setenv("CAIRN_DIRECT_IO", "0")
    write(tmp_path, content := numbers(5 * MEMORY))
    assert (tmp_path / "file").read_bytes() == content


def test_what_is_read_back_differs_where_the_disk_has_something_else(tmp_path, monkeypatch):
    content = numbers(5 * MEMORY)
    real = direct_writes.DirectWrites._read

    def other(writes, start, end):
        if start == 2 * MEMORY:
            with open(writes._path, "r+b") as stream:
                stream.seek(start + 5)
                stream.write(bytes([content[start + 5] ^ 1]))
        return real(writes, start, end)

    monkeypatch.setattr(direct_writes.DirectWrites, "_read", other)
    sink = write(tmp_path, content, read_back=True)
    found = (tmp_path / "file").read_bytes()
    assert found != content
    assert sink.read_back == f"{google_crc32c.value(found):08x}"


@pytest.mark.parametrize("size", [SMALL - 1, 2 * MEMORY, 30 * MEMORY])
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch, size):
    def pwrite(descriptor, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    (tmp_path / "file").write_bytes(b"as before")
    with pytest.raises(StoreFullError, match="file"):
        write(tmp_path, bytes(size), cuts=range(0, size, MEMORY // 3), read_back=True)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"as before"
    assert not own_threads()


def test_a_disk_that_cannot_be_read_back_leaves_nothing(tmp_path, monkeypatch):
    ask = os.preadv

    def preadv(descriptor, buffers, offset, flags=0):
        if offset >= 3 * MEMORY:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return ask(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StorageError, match=r"file: found .Errno 5. Input/output error"):
        write(tmp_path, bytes(5 * MEMORY), read_back=True)
    assert list(tmp_path.iterdir()) == []
    assert not own_threads()


def test_a_file_that_is_given_up_is_neither_written_nor_read_any_more(tmp_path):
    sink = writer(tmp_path, read_back=True)
    sink.write(bytes(20 * MEMORY))
    sink.abort()
    sink.abort()
    assert sink.read_back is None
    assert list(tmp_path.iterdir()) == []
    assert not own_threads()


def own_threads():
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("cairn-write", "cairn-read-back"))]
