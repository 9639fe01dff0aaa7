"""Files are read past the page cache where that is possible, and hold the same bytes as ever."""

import errno
import fcntl
import os
import queue

import numpy as np
import pytest

from cairn.storage.store.disk.direct_io import DISK_ALIGNMENT, read_into
from tests.storage.seams import direct_io

MEMORY = 16 * DISK_ALIGNMENT
SIZE = 5 * MEMORY + 777
CONTENT = np.random.default_rng(1).bytes(SIZE)


@pytest.fixture(autouse=True)
def _small_memory(monkeypatch):
    monkeypatch.setattr(direct_io, "BUFFER_BYTES", MEMORY)
    monkeypatch.setattr(direct_io, "_free", queue.SimpleQueue())
    monkeypatch.setattr(direct_io, "_DIRECT_BYTES", DISK_ALIGNMENT)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "file"
    found.write_bytes(CONTENT)
    return found


@pytest.fixture
def descriptor(path):
    found = os.open(path, os.O_RDONLY)
    forget(found)
    yield found
    os.close(found)


@pytest.fixture
def reads(monkeypatch):
    """What the system was asked for: whether past the page cache, from where, how many bytes."""
    made = []
    ask = os.preadv

    def preadv(descriptor, buffers, offset, flags=0):
        if not flags:
            direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
            made.append((direct, offset, sum(map(len, buffers))))
        return ask(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    return made


def forget(descriptor):
    """Have the page cache drop a file."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def taken(descriptor, offset, *lengths):
    buffers = [bytearray(length) for length in lengths]
    count = read_into(descriptor, buffers, offset)
    assert not any(b"".join(buffers)[count:])
    return b"".join(buffers)[:count]


def in_blocks(descriptor, start, end):
    return b"".join(map(bytes, direct_io.read_blocks(descriptor, start, end)))


@pytest.mark.parametrize("setting", ["1", "0"])
@pytest.mark.parametrize(
    "lengths",
    [
        (DISK_ALIGNMENT,),
        (DISK_ALIGNMENT + 1, 4),
        (MEMORY, 4, MEMORY, 4),
        (3, 0, 2 * MEMORY - 3),
        (SIZE,),
        (MEMORY,) * 7,
    ],
)
def test_any_stretch_of_a_cold_file_is_what_was_written(descriptor, monkeypatch, setting, lengths):
    monkeypatch.setenv("CAIRN_DIRECT_IO", setting)
    for offset in (0, 1, DISK_ALIGNMENT - 1, DISK_ALIGNMENT, MEMORY - 4, 2 * MEMORY + 5):
        forget(descriptor)
        assert taken(descriptor, offset, *lengths) == CONTENT[offset : offset + sum(lengths)]


@pytest.mark.parametrize("setting", ["1", "0"])
@pytest.mark.parametrize(
    "length", [0, 1, DISK_ALIGNMENT + 1, MEMORY, 3 * MEMORY - 2, SIZE, 1 << 62]
)
def test_any_stretch_of_a_cold_file_comes_block_by_block(descriptor, monkeypatch, setting, length):
    monkeypatch.setenv("CAIRN_DIRECT_IO", setting)
    for start in (0, 1, DISK_ALIGNMENT, MEMORY - 4, 2 * MEMORY + 5, SIZE - 1, SIZE):
        forget(descriptor)
        assert in_blocks(descriptor, start, start + length) == CONTENT[start : start + length]


def test_blocks_that_nobody_has_read_go_past_the_page_cache(descriptor, reads):
    assert in_blocks(descriptor, 5, 5 + 2 * MEMORY) == CONTENT[5 : 5 + 2 * MEMORY]
    assert [direct for direct, _, _ in reads] == [True, True, False]  # the last one has 5 bytes
    assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_bytes_that_nobody_has_read_go_past_the_page_cache(descriptor, reads):
    assert taken(descriptor, 5, 2 * MEMORY) == CONTENT[5 : 5 + 2 * MEMORY]
    assert reads == [(True, 0, MEMORY), (True, MEMORY, MEMORY), (True, 2 * MEMORY, DISK_ALIGNMENT)]
    assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_bytes_that_the_page_cache_has_come_from_there(descriptor, path, reads):
    path.read_bytes()
    assert taken(descriptor, 5, 2 * MEMORY) == CONTENT[5 : 5 + 2 * MEMORY]
    assert [direct for direct, _, _ in reads] == [False]


def test_few_bytes_are_read_through_the_page_cache(descriptor, reads):
    assert taken(descriptor, 5, DISK_ALIGNMENT - 1) == CONTENT[5 : DISK_ALIGNMENT + 4]
    assert [direct for direct, _, _ in reads] == [False]


def test_bytes_that_were_just_written_are_read_though_no_disk_has_them_yet(path, descriptor):
    changed = bytes(reversed(CONTENT))
    path.write_bytes(changed)
    assert taken(descriptor, 3, SIZE - 3) == changed[3:]


def test_a_file_system_without_direct_reads_is_read_through_its_page_cache(
    descriptor, monkeypatch, reads
):
    control = fcntl.fcntl

    def refuse(descriptor, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert taken(descriptor, 1, SIZE) == CONTENT[1:]
    assert in_blocks(descriptor, 1, SIZE) == CONTENT[1:]
    assert not any(direct for direct, _, _ in reads)


def test_a_file_system_with_another_alignment_is_read_through_its_page_cache(
    descriptor, monkeypatch
):
    ask = os.preadv

    def refuse(descriptor, buffers, offset, flags=0):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and not flags:
            raise OSError(errno.EINVAL, "Invalid argument")
        return ask(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", refuse)
    assert taken(descriptor, 1, SIZE) == CONTENT[1:]
    assert in_blocks(descriptor, 1, SIZE) == CONTENT[1:]


def test_a_disk_that_fails_is_not_asked_another_way(descriptor, monkeypatch):
    ask = os.preadv

    def fail(descriptor, buffers, offset, flags=0):
        if flags:
            return ask(descriptor, buffers, offset, flags)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        taken(descriptor, 0, SIZE)


def test_a_read_that_gives_less_than_was_asked_for_goes_on(descriptor, monkeypatch):
    ask = os.preadv

    def some(descriptor, buffers, offset, flags=0):
        return ask(descriptor, [buffers[0][:DISK_ALIGNMENT]], offset, flags)

    monkeypatch.setattr(os, "preadv", some)
    assert taken(descriptor, 7, 2 * MEMORY) == CONTENT[7 : 7 + 2 * MEMORY]
