"""gcsfs, as `cairn.storage.store.files` uses it."""

import os

import gcsfs
import pytest


@pytest.fixture
def fs(gcs):
    return gcsfs.GCSFileSystem(use_listings_cache=False, skip_instance_cache=True)


def test_written_file_is_read_back_whole_and_in_part(gcs, fs):
    data = os.urandom((12 << 20) + 3)
    with fs.open(f"{gcs.bucket}/folder/file.bin", "wb") as file:
        for start in range(0, len(data), 1_000_000):
            file.write(data[start : start + 1_000_000])
        assert gcs.names() == []
    assert fs.cat_file(f"{gcs.bucket}/folder/file.bin") == data
    assert fs.cat_file(f"{gcs.bucket}/folder/file.bin", 5_000, 6_000) == data[5_000:6_000]
    with fs.open(f"{gcs.bucket}/folder/file.bin", "rb") as file:
        file.seek(-10, os.SEEK_END)
        assert file.read() == data[-10:]


def test_abandoned_write_leaves_nothing_visible(gcs, fs):
    file = fs.open(f"{gcs.bucket}/abandoned", "wb", autocommit=False)
    file.write(bytes(6 << 20))
    file.close()
    assert gcs.names() == []
    file.discard()
    assert gcs.names() == []


def test_listing_tells_files_from_folders(gcs, fs):
    for name in ("a/1", "a/b/2", "a/b/3", "top"):
        fs.pipe_file(f"{gcs.bucket}/{name}", name.encode())
    found = {entry["name"]: entry["type"] for entry in fs.ls(f"{gcs.bucket}/a", detail=True)}
    assert found == {f"{gcs.bucket}/a/1": "file", f"{gcs.bucket}/a/b": "directory"}
    assert fs.info(f"{gcs.bucket}/top")["size"] == 3
    assert fs.isdir(f"{gcs.bucket}/a/b")
    assert not fs.exists(f"{gcs.bucket}/none")
    assert len(fs.find(f"{gcs.bucket}/a")) == 3


def test_copy_move_and_recursive_delete(gcs, fs):
    for name in ("a/1", "a/b/2"):
        fs.pipe_file(f"{gcs.bucket}/{name}", name.encode())
    fs.cp(f"{gcs.bucket}/a/", f"{gcs.bucket}/copy/", recursive=True)
    fs.mv(f"{gcs.bucket}/a/1", f"{gcs.bucket}/moved")
    assert gcs.names() == ["a/b/2", "copy/1", "copy/b/2", "moved"]
    fs.rm(f"{gcs.bucket}/copy", recursive=True)
    assert gcs.names() == ["a/b/2", "moved"]
    assert fs.cat_file(f"{gcs.bucket}/moved") == b"a/1"


def test_local_file_is_put_and_got(gcs, fs, tmp_path):
    data = os.urandom((7 << 20) + 1)
    (tmp_path / "in").write_bytes(data)
    fs.put_file(str(tmp_path / "in"), f"{gcs.bucket}/put")
    fs.get_file(f"{gcs.bucket}/put", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == data


def test_create_only_write_is_refused_when_the_object_exists(gcs, fs):
    fs.pipe_file(f"{gcs.bucket}/once", b"1", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{gcs.bucket}/once", b"2", mode="create")


def test_quota_is_an_oserror_and_leaves_nothing(gcs, fs):
    gcs.set_quota(1000)
    with pytest.raises(OSError, match="quota"):
        fs.pipe_file(f"{gcs.bucket}/refused", bytes(2000))
    with pytest.raises(OSError, match="quota"), fs.open(f"{gcs.bucket}/large", "wb") as file:
        file.write(bytes(6 << 20))
    assert gcs.names() == []


def test_unavailable_server_is_asked_again(gcs, fs):
    fault = gcs.faults.add("status", name="key$", status=503)
    fs.pipe_file(f"{gcs.bucket}/key", b"value")
    assert fault.fired == 1
    assert fs.cat_file(f"{gcs.bucket}/key") == b"value"
