"""What a store answers, and what is made of it: tried again, told at once, or given up in time.

The GCS double answers each order of trouble once; its log says how often it was asked.
"""

import pytest

from cairn import (
    NotFoundError,
    ObjectStore,
    PreconditionFailedError,
    StorageError,
    StoreUnavailableError,
    open_files,
    parse_uri,
)

PASSING = (408, 429, 500, 502, 503, 504)
VALUE = bytes(10_000)

OBJECT_CALLS = {
    "media.get": lambda store: store.read("key"),
    "upload": lambda store: store.write("key", VALUE),
    "objects.delete": lambda store: store.delete("key"),
    "objects.list": lambda store: store.list(),
}


@pytest.fixture
def store(gcs):
    """Small objects, one of them there."""
    store = ObjectStore(parse_uri(f"{gcs.bucket_uri}/run"))
    store.write("key", VALUE)
    return store


@pytest.fixture
def files(gcs, store):
    """The same as files."""
    return open_files(store.uri)


@pytest.fixture
def asked(gcs, store):
    """Gives the statuses of all requests of an operation since the test began; 0: cut."""
    gcs.server.requests.clear()  # of which the server keeps so many

    def statuses(operation):
        return [
            served.status
            for served in list(gcs.server.requests)
            if served.bucket == gcs.bucket and served.operation == operation
        ]

    return statuses


@pytest.mark.parametrize("status", PASSING)
@pytest.mark.parametrize("operation", OBJECT_CALLS)
def test_passing_trouble_is_tried_again(gcs, store, asked, operation, status):
    gcs.faults.add("status", status=status, operation=operation)
    OBJECT_CALLS[operation](store)
    first, again = asked(operation)
    assert (first, again // 100) == (status, 2)


@pytest.mark.parametrize("status", [408, 429, 503])
def test_passing_trouble_with_files_is_tried_again(gcs, files, asked, status):
    gcs.faults.add("status", status=status, operation="objects.get")
    assert files.stat("key").size == len(VALUE)
    assert asked("objects.get") == [status, 200]


@pytest.mark.parametrize("status", [400, 401, 403])
@pytest.mark.parametrize("operation", ["media.get", "upload", "objects.delete"])
def test_refusal_is_told_at_once(gcs, store, asked, operation, status):
    gcs.faults.add("status", status=status, operation=operation)
    with pytest.raises(StorageError, match=rf"run/key: .*{status}"):
        OBJECT_CALLS[operation](store)
    assert asked(operation) == [status]


@pytest.mark.parametrize("name", ["list", "walk"])
def test_refused_listing_of_files_is_told_at_once(gcs, files, asked, name):
    gcs.faults.add("status", status=403, operation="objects.list")
    with pytest.raises(StoreUnavailableError, match="refused access"):
        getattr(files, name)()
    assert asked("objects.list") == [403]


@pytest.mark.parametrize("call", ["list", "delete_prefix"])
def test_refused_listing_is_never_taken_for_an_empty_store(gcs, store, call):
    gcs.faults.add("status", status=403, operation="objects.list", count=None)
    with pytest.raises(StoreUnavailableError, match="refused access"):
        getattr(store, call)("a/")


def test_missing_object_is_asked_for_once(store, files, asked):
    assert store.read("other") is None
    assert asked("media.get") == [404]
    with pytest.raises(NotFoundError):
        files.stat("other")


def test_lost_condition_is_told_at_once(store, asked):
    seen = store.read("key")
    store.write("key", b"newer")
    with pytest.raises(PreconditionFailedError) as caught:
        store.write_if("key", b"mine", generation=seen.generation)
    assert caught.value.current.value == b"newer"
    assert asked("upload") == [200, 412]


@pytest.mark.parametrize("kind", ["cut_download", "lost_response"])
def test_answer_that_is_cut_is_asked_for_again(gcs, store, asked, kind):
    gcs.faults.add(kind, operation=r"media\.get", nbytes=100)
    assert store.read("key").value == VALUE
    assert asked("media.get")[-2:] == [0, 200]


@pytest.mark.parametrize("kind", ["cut_upload", "lost_response"])
def test_upload_that_is_cut_is_sent_again(gcs, store, asked, kind):
    gcs.faults.add(kind, operation="upload", nbytes=100)
    store.write("key", VALUE[::2])
    assert asked("upload") == [0, 200]
    assert store.read("key").value == VALUE[::2]


def test_write_whose_answer_was_lost_does_not_lose_against_itself(gcs, store, asked):
    gcs.faults.add("lost_response", operation="upload")
    generation = store.write_if("fresh", b"mine", generation=None, same_is_success=True)
    assert asked("upload") == [0, 412]
    assert store.read("fresh") == (b"mine", generation)


def test_store_that_is_silent_is_given_up_in_time(gcs, store, monkeypatch):
    monkeypatch.setattr("cairn.storage.store.deadlines.DEADLINE_SECONDS", 0.2)
    held = gcs.faults.add("hold", operation="upload", count=None)
    with pytest.raises(StoreUnavailableError, match=r"an answer within 0\.2\d* s"):
        store.write("key", b"late")
    held.release()
