"""Files are on their way to the disk before they are whole; their bytes are the same."""

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
