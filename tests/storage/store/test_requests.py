"""Whoever listens hears of every request, once, whatever library carries it."""

import pytest

from cairn import (
    CheckpointReader,
    NotFoundError,
    ObjectStore,
    PreconditionFailedError,
    Run,
    StoreUnavailableError,
    open_files,
    parse_uri,
)
from cairn.storage.store.requests import listen
from tests.service.jobs import save_llama
from tests.storage.seams import deadlines


@pytest.fixture
def told():
    """What was told so far."""
    calls = []
    end = listen(calls.append)
    yield calls
    end()


@pytest.fixture(params=["file", "gs"])
def uri(request, tmp_path):
    if request.param == "file":
        return parse_uri(str(tmp_path / "heard"))
    return parse_uri(f"{request.getfixturevalue('gcs').bucket_uri}/heard")


def heard(told):
    """Since it was asked last, in the store: operation and outcome of each, by the path's end."""
    own = [call for call in told if "/heard" in call.path]  # what other tests left is elsewhere
    found = [(call.operation, call.path.rpartition("/heard")[2], call.outcome) for call in own]
    assert all(0 <= call.seconds < 60 for call in told)
    told.clear()
    return found


def test_requests_for_small_objects_are_told(uri, told):
    store = ObjectStore.open(uri)
    generation = store.write_if("a", b"1", generation=None)
    assert ("write", "/a", "ok") in heard(told)
    assert store.read("a").value == b"1"
    assert heard(told) == [("read", "/a", "ok")]
    store.read_many(["a", "b"])
    assert heard(told) == [("read", "/a", "ok"), ("read", "/b", "ok")]
    store.list("")
    assert [one[0] for one in heard(told)] == ["list"]
    store.delete_if("a", generation=generation)
    assert heard(told) == [("delete", "/a", "ok")]


def test_requests_for_files_are_told_and_what_is_not_there_is_absent(uri, told):
    files = open_files(uri)
    with files.open_write("f") as stream:
        stream.write(b"bytes")
    assert {("write", "/f", "ok")} <= set(heard(told))
    files.stat("f")
    assert heard(told) == [("stat", "/f", "ok")]
    assert files.read_range("f", 0, 5) == b"bytes"
    assert heard(told) == [("read", "/f", "ok")]
    with pytest.raises(NotFoundError):
        files.stat("nothing")
    assert heard(told) == [("stat", "/nothing", "absent")]
    files.copy("f", files, "g")
    assert "g" in {entry.name for entry in files.list()}
    told.clear()
    files.delete_tree("f")
    assert "delete" in {one[0] for one in heard(told)}


def test_a_lost_race_is_an_answer(uri, told):
    store = ObjectStore.open(uri)
    store.write("a", b"1")
    told.clear()
    with pytest.raises(PreconditionFailedError):
        store.write_if("a", b"2", generation=None)
    assert {one[2] for one in heard(told)} == {"ok"}


def test_a_store_that_is_silent_is_unavailable(gcs, told, monkeypatch):
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", 0.2)
    gcs.faults.add("hang")
    with pytest.raises(StoreUnavailableError):
        ObjectStore.open(f"{gcs.bucket_uri}/heard").read("a")
    assert heard(told) == [("read", "/a", "unavailable")]


def test_reads_of_arrays_are_told(told, tmp_path):
    save_llama(tmp_path / "heard")
    run = Run.open(tmp_path / "heard")
    info = run.step(1)
    reader = CheckpointReader.open(run.step_uri(info), run.manifest(info))
    told.clear()
    for path in reader.leaves("model"):
        reader.read("model", path)
    assert "read" in {one[0] for one in heard(told)}


def test_who_listens_no_more_hears_nothing(tmp_path):
    calls = []
    end = listen(calls.append)
    other = listen(lambda call: None)
    end()
    ObjectStore.open(parse_uri(str(tmp_path))).read("a")
    other()
    assert calls == []
