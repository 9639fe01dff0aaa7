"""What holds of S3 alone: what Orbax and TensorStore do there, uploads in parts, faults."""

import pytest
from orbax.checkpoint._src.serialization import tensorstore_utils

from cairn import CorruptionError, ObjectStore, PreconditionFailedError, StoreUnavailableError
from cairn.storage.store import files_s3
from cairn.storage.store.open_files import open_files
from tests.s3 import objects as served_objects


def test_plain_orbax_can_not_read_arrays_in_s3():
    with pytest.raises(ValueError, match="Checkpoint path should be absolute"):
        tensorstore_utils.build_kvstore_tspec("s3://bucket/run/attempts/1/1/model", name="w")


def served(s3, operation):
    return [
        one for one in s3.server.requests if (one.bucket, one.operation) == (s3.bucket, operation)
    ]


def test_the_store_itself_is_asked_for_a_condition_by_one_request(s3):
    objects = ObjectStore.open(s3.bucket_uri)
    generation = objects.write_if("a.json", b"{}", generation=None)
    assert objects.refuses_write("a.json", b"[]", generation=None)
    objects.write_if("a.json", b"[1]", generation=generation)
    assert objects.refuses_write("a.json", b"[]", generation=generation)
    asked = [one.operation for one in s3.server.requests if one.bucket == s3.bucket]
    assert asked == 4 * ["objects.put"]


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_a_refusal_that_passes_is_asked_again(s3, status):
    objects, files = ObjectStore.open(s3.bucket_uri), open_files(s3.bucket_uri)
    generation = objects.write("a.json", b"{}")
    fault = s3.faults.add("status", status=status, operation="objects.put")
    objects.write_if("a.json", b'{"b": 1}', generation=generation)
    assert fault.fired == 1
    if status != 409:
        fault = s3.faults.add("status", status=status, operation="objects.list")
        assert [entry.name for entry in files.list()] == ["a.json"]
        assert fault.fired == 1


def test_a_write_whose_answer_was_lost_finds_its_own_bytes(s3):
    objects = ObjectStore.open(s3.bucket_uri)
    generation = objects.write("a.json", b"{}")
    s3.faults.add("lost_response", operation="objects.put")
    objects.write_if("a.json", b'{"b": 1}', generation=generation, same_is_success=True)
    s3.faults.add("lost_response", operation="objects.put")
    objects.delete_if("a.json", generation=objects.read("a.json").generation)
    assert objects.read("a.json") is None
    s3.faults.add("lost_response", operation="objects.put")
    objects.write_if("a.json", b"{}", generation=None, same_is_success=True)
    with pytest.raises(PreconditionFailedError):
        objects.write_if("a.json", b"[]", generation=None)


@pytest.mark.parametrize("nbytes", [10, 6 << 20])
def test_a_copy_is_refused_once_the_file_has_another_etag(s3, nbytes):
    objects, files = ObjectStore.open(s3.bucket_uri), open_files(s3.bucket_uri)
    etag = objects.etag_of(objects.start_write("a", bytes(nbytes))())
    assert etag == files.stat("a").etag == files.list()[0].etag
    files.copy("a", files, "b", etag=etag)
    assert files.read_range("b", 0, 2 * nbytes) == bytes(nbytes)
    objects.write("a", bytes(nbytes - 1) + b"1")
    with pytest.raises(PreconditionFailedError):
        files.copy("a", files, "c", etag=etag)
    assert s3.names() == ["a", "b"]


def test_who_is_not_let_in_is_told_so(s3):
    for operation, call in {
        "objects.list": lambda: open_files(s3.bucket_uri).list(),
        "objects.put": lambda: ObjectStore.open(s3.bucket_uri).write("a.json", b"{}"),
    }.items():
        s3.faults.add("status", status=403, operation=operation)
        with pytest.raises(StoreUnavailableError, match="refused access"):
            call()


@pytest.fixture
def small_parts(monkeypatch):
    """Files of some MB have several parts, and are copied in parts."""
    monkeypatch.setattr(files_s3, "_PART_BYTES", 5 << 20)
    monkeypatch.setattr(files_s3, "_MAX_COPY_BYTES", 6 << 20)
    monkeypatch.setattr(served_objects, "MAX_COPY_BYTES", 6 << 20)
    monkeypatch.setattr(files_s3, "_COPY_PART_BYTES", 6 << 20)


DATA = bytes(range(256)) * (12 << 12)
"""12 MB."""


@pytest.mark.usefixtures("small_parts")
def test_a_large_file_goes_in_parts_and_is_copied_in_parts(s3):
    files = open_files(f"{s3.bucket_uri}/a")
    lost = s3.faults.add("lost_response", operation="uploads.complete")
    cut = s3.faults.add("cut_upload", operation="uploads.put", nbytes=1 << 20)
    with files.open_write("large") as writer:
        for start in range(0, len(DATA), 1_000_000):
            writer.write(DATA[start : start + 1_000_000])
    assert (lost.fired, cut.fired) == (1, 1)
    files.copy("large", open_files(f"{s3.bucket_uri}/b"), "copy")
    for name in ("a/large", "b/copy"):
        assert open_files(s3.bucket_uri).read_range(name, 0, 2 * len(DATA)) == DATA
    assert files.stat("large").crc32c is not None
    assert [len(served(s3, one)) for one in ("objects.copy", "uploads.copy")] == [1, 2]


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_fails_is_aborted_and_nothing_is_there(s3):
    files = open_files(s3.bucket_uri)
    s3.faults.add("status", status=403, operation="uploads.put", skip=1)
    with pytest.raises(StoreUnavailableError), files.open_write("large") as writer:
        writer.write(DATA)
    s3.faults.add("status", status=400, operation="uploads.copy", skip=1)
    with files.open_write("whole") as writer:
        writer.write(DATA)
    with pytest.raises(Exception, match="injected"):
        files.copy("whole", files, "copy")
    assert s3.names() == ["whole"]
    assert s3.server.uploads.names(s3.bucket) == []


def test_an_upload_that_arrived_otherwise_is_told(s3, monkeypatch):
    files = open_files(s3.bucket_uri)
    writer = files.open_write("file")
    writer.write(b"some bytes")
    stat = files.stat
    monkeypatch.setattr(files, "stat", lambda rel: stat(rel)._replace(crc32c="00000000"))
    with pytest.raises(CorruptionError, match="arrived damaged"):
        writer.commit()


def test_a_download_that_is_cut_is_asked_for_again(s3):
    files = open_files(s3.bucket_uri)
    with files.open_write("file") as writer:
        writer.write(b"0123456789")
    cut = s3.faults.add("cut_download", operation="media.get", nbytes=3, count=2)
    assert files.read_range("file", 0, 10) == b"0123456789"
    assert cut.fired == 2
    s3.faults.add("cut_download", operation="media.get", nbytes=3, count=None)
    with pytest.raises(StoreUnavailableError):
        files.read_range("file", 0, 10)
    s3.faults.clear()
    assert files.read_range("file", 8, 20) == b"89"
    assert files.read_range("file", 10, 20) == b""
