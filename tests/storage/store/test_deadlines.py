"""Waits end once nothing is answered, not while something is, and when the caller's time does."""

import contextlib
import threading
import time

import pytest
import tensorstore as ts

from cairn import ObjectStore, StoreUnavailableError, open_files, parse_uri
from cairn.storage.store.deadlines import (
    Progress,
    ReadProgress,
    WatchedCall,
    deadline_after,
    deadline_seconds_left,
    wait_for,
)
from tests.faults.report import is_long
from tests.storage.seams import deadlines

SECONDS = 0.4
WAIT_SECONDS = 60


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", SECONDS)


@pytest.fixture
def endless():
    """A future of TensorStore's that nobody ends but the test."""
    return ts.Promise.new()


@pytest.fixture
def never():
    """Waits until the test ends."""
    event = threading.Event()
    yield lambda: event.wait(WAIT_SECONDS)
    event.set()


def test_the_deadline_is_ninety_seconds_unless_it_is_patched(monkeypatch):
    monkeypatch.undo()
    assert deadlines.DEADLINE_SECONDS == 90


def test_a_future_that_nothing_comes_of_is_cancelled(endless):
    _, future = endless
    with pytest.raises(TimeoutError, match=r"no answer within 0\.4"):
        wait_for(future)
    assert future.cancelled()


def test_a_future_is_waited_for_while_others_that_belong_to_it_are_answered(endless):
    promise, future = endless
    progress = Progress()

    def answered():
        for _ in range(6):
            time.sleep(SECONDS / 2)
            progress.record_answer()
        promise.set_result(7)

    threading.Thread(target=answered).start()
    assert wait_for(future, progress) == 7


def test_a_read_is_waited_for_while_bytes_arrive_and_not_for_small_change(endless, tmp_path):
    promise, future = endless
    store = ts.KvStore.open(f"file://{tmp_path}/").result()
    store["large"], store["small"] = bytes(2 << 20), b"lease"

    def reads(key, times):
        for _ in range(times):
            time.sleep(SECONDS / 4)
            store.read(key).result()

    reading = threading.Thread(target=lambda: (reads("large", 10), promise.set_result(7)))
    reading.start()
    assert wait_for(future, ReadProgress()) == 7
    reading.join()
    small = threading.Thread(target=reads, args=("small", 10))
    small.start()
    unkept, silent = ts.Promise.new()
    with pytest.raises(TimeoutError):
        wait_for(silent, ReadProgress())
    small.join()
    unkept.set_result(None)


def test_a_call_that_waits_for_good_is_given_up_and_named(never):
    watched = WatchedCall(never, path="gs://bucket/step")
    told = r"gs://bucket/step: expected an answer within [\d.]+ s, found none"
    with pytest.raises(StoreUnavailableError, match=told):
        watched.result()
    assert watched.is_running


def test_a_call_is_waited_for_while_what_it_does_elsewhere_goes_on():
    progress = Progress()

    def call():
        with progress.paused():
            time.sleep(3 * SECONDS)
        return 7

    assert WatchedCall(call, path="x").result(progress) == 7


def test_a_call_is_given_up_soon_once_its_end_is_all_that_is_missing(never, monkeypatch):
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", float(WAIT_SECONDS))
    progress = Progress()
    watched = WatchedCall(lambda: (progress.end_within(0.1), never()), path="x")
    monkeypatch.setattr(deadlines, "_LOOKS", 1000)
    with pytest.raises(StoreUnavailableError):
        watched.result(progress)


def test_what_a_call_raises_is_raised():
    def broken():
        raise OSError(5, "broken")

    with pytest.raises(OSError, match="broken"):
        deadlines.call_with_deadline(broken, path="x")


def test_the_soonest_of_nested_times_counts_and_only_in_its_thread(endless, monkeypatch):
    monkeypatch.setattr(deadlines, "DEADLINE_SECONDS", float(WAIT_SECONDS))
    assert deadline_seconds_left() is None
    others = []
    with deadline_after(0.2), deadline_after(50), deadline_after(None):
        thread = threading.Thread(target=lambda: others.append(deadline_seconds_left()))
        thread.start()
        thread.join()
        with pytest.raises(TimeoutError, match="no answer"):
            wait_for(endless[1])
        with pytest.raises(StoreUnavailableError):
            deadlines.call_with_deadline(lambda: time.sleep(1), path="x")
    assert others == [None]
    assert deadline_seconds_left() is None


FILE_CALLS = {
    "stat": lambda files: files.stat("file"),
    "list": lambda files: files.list(),
    "walk": lambda files: files.walk(),
    "read_range": lambda files: files.read_range("file", 0, 10),
    "read_into": lambda files: files.read_into("file", 0, memoryview(bytearray(10))),
    "open_read": lambda files: files.open_read("file").read(),
    "write": lambda files: _written(files),
    "copy": lambda files: files.copy("file", files, "other"),
    "delete_tree": lambda files: files.delete_tree("file"),
}


def _written(files):
    with files.open_write("new") as sink:
        sink.write(bytes(20 << 20))


@pytest.mark.parametrize("call", FILE_CALLS)
def test_every_call_on_files_ends_at_each_request_that_hangs(gcs, call, monkeypatch):
    with monkeypatch.context() as patch:  # files keep the deadline that they were opened with
        patch.setattr(deadlines, "DEADLINE_SECONDS", float(WAIT_SECONDS))
        files = open_files(f"{gcs.bucket_uri}/folder")
        ObjectStore(parse_uri(files.uri)).write("file", b"0123456789")
        gcs.server.requests.clear()
        FILE_CALLS[call](files)
    files = open_files(f"{gcs.bucket_uri}/folder")
    ended = 0
    asked = len(gcs.server.requests)
    for at in range(asked) if is_long() else {0, asked - 1}:
        gcs.faults.clear()
        ObjectStore(files.uri).write("file", b"0123456789")
        gcs.faults.add("hang", skip=at, count=None)
        with contextlib.suppress(StoreUnavailableError):
            found = FILE_CALLS[call](files)  # what is read ahead may be asked for or not
            assert not isinstance(found, bytes) or found == b"0123456789"
            continue
        ended += 1
    assert ended


def test_the_end_of_a_stream_that_was_read_in_parts_is_its_end(gcs):
    files = open_files(f"{gcs.bucket_uri}/folder")
    data = bytes(range(256)) * 1000
    ObjectStore(files.uri).write("file", data)
    with files.open_read("file") as stream:
        assert stream.read(1000) == data[:1000]
        stream.seek(-500, 2)
        assert stream.read() == data[-500:]
        assert stream.read(10) == b""
