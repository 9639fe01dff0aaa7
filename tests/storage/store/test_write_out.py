"""Files are on their way to the disk before they are whole; their bytes are the same."""

import google_crc32c
import numpy as np
import pytest

from cairn.storage.store import files_local, open_files
from cairn.storage.store.uri import parse_uri


@pytest.fixture
def asked(monkeypatch):
    ranges = []
    real = files_local._write_out
    monkeypatch.setattr(
        files_local, "_write_out", lambda *args: (ranges.append(args[1:]), real(*args))
    )
    monkeypatch.setattr(files_local, "_WRITE_OUT_BYTES", 1000)
    return ranges


def test_each_byte_is_sent_on_its_way_once_but_the_last_few(asked, tmp_path):
    data = np.random.default_rng(0).bytes(5500)
    with open_files(parse_uri(tmp_path)).open_write("file") as sink:
        for start in range(0, len(data), 550):
            sink.write(data[start : start + 550])
    assert asked == [(0, 1100), (1100, 2200), (2200, 3300), (3300, 4400), (4400, 5500)]
    assert (tmp_path / "file").read_bytes() == data


def test_where_the_system_has_no_such_call_files_are_written_all_the_same(
    asked, tmp_path, monkeypatch
):
    monkeypatch.setattr(files_local, "_sync_file_range", lambda: None)
    with open_files(parse_uri(tmp_path)).open_write("file") as sink:
        sink.write(b"x" * 3000)
    assert asked
    assert (tmp_path / "file").read_bytes() == b"x" * 3000


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(files_local, "_READ_BACK_BYTES", 1000)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 5500])
def test_what_the_disk_gave_back_is_summed_before_a_file_has_its_name(small_parts, tmp_path, size):
    data = np.random.default_rng(size).bytes(size)
    with open_files(parse_uri(tmp_path)).open_write("file", read_back=True) as sink:
        for start in range(0, len(data), 550):
            sink.write(data[start : start + 550])
    assert sink.read_back == f"{google_crc32c.value(data):08x}"
    assert (tmp_path / "file").read_bytes() == data


def test_what_the_disk_gave_back_differs_where_the_disk_has_something_else(small_parts, tmp_path):
    data = bytes(5500)
    with open_files(parse_uri(tmp_path)).open_write("file", read_back=True) as sink:
        sink.write(data[:950])
        (temporary,) = tmp_path.iterdir()
        with open(temporary, "r+b") as other:
            other.write(b"x")
        sink.write(data[950:])
    assert sink.read_back == f"{google_crc32c.value(b'x' + data[1:]):08x}"


def test_a_file_that_is_given_up_is_read_no_more(small_parts, tmp_path):
    sink = open_files(parse_uri(tmp_path)).open_write("file", read_back=True)
    sink.write(bytes(5500))
    sink.abort()
    assert sink.read_back is None
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_read_back_unless_it_is_asked_for(tmp_path):
    with open_files(parse_uri(tmp_path)).open_write("file") as sink:
        sink.write(b"x")
    assert sink.read_back is None
