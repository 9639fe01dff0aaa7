"""TensorStore's gcs driver: compare-and-swap that loses nothing, ranges, listing, quota."""

import threading

import pytest
import tensorstore as ts

THREADS = 4
INCREMENTS = 20


@pytest.fixture
def store(gcs):
    return ts.KvStore.open({"driver": "gcs", "bucket": gcs.bucket, "path": "run/"}).result()


def increment(store):
    while True:
        found = store.read("counter").result()
        value = int(found.value) if found.state == "value" else 0
        written = store.write(
            "counter", str(value + 1).encode(), if_equal=found.stamp.generation
        ).result()
        if written.generation:
            return


def test_racing_increments_lose_nothing(store):
    errors = []

    def work():
        try:
            for _ in range(INCREMENTS):
                increment(store)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.read("counter").result().value == str(THREADS * INCREMENTS).encode()


def test_create_only_write_and_stale_delete_lose(store):
    absent = store.read("key").result().stamp.generation
    first = store.write("key", b"1", if_equal=absent).result()
    assert first.generation
    assert not store.write("key", b"2", if_equal=absent).result().generation
    second = store.write("key", b"2", if_equal=first.generation).result()
    assert not store.write("key", b"3", if_equal=first.generation).result().generation
    assert not store.write("key", None, if_equal=first.generation).result().generation
    assert store.read("key").result().stamp.generation == second.generation
    assert store.write("key", None, if_equal=second.generation).result().generation
    assert store.read("key").result().state == "missing"


def test_double_can_be_ordered_to_forget_conditions(gcs, store):
    first = store.write("key", b"1").result().generation
    store.write("key", b"2").result()
    gcs.faults.add("unconditional", operation="upload|objects.delete", count=None)
    assert store.write("key", b"3", if_equal=first).result().generation
    assert store.write("key", None, if_equal=first).result().generation
    assert store.read("key").result().state == "missing"


def test_listing_and_range_delete_keep_to_their_range(store):
    for name in ("a", "b/1", "b/2", "c"):
        store.write(name, name.encode()).result()
    assert store.list().result() == [b"a", b"b/1", b"b/2", b"c"]
    store.delete_range(ts.KvStore.KeyRange("b/", "b0")).result()
    assert store.list().result() == [b"a", b"c"]


def test_large_value_and_byte_range_come_back(store):
    value = bytes(range(256)) * 40_000
    store.write("large", value).result()
    assert store.read("large").result().value == value
    part = store.read("large", byte_range=slice(5_000_000, 5_000_100)).result()
    assert part.value == value[5_000_000:5_000_100]


def test_quota_refuses_new_bytes_and_keeps_what_is_there(gcs, store):
    store.write("kept", bytes(1000)).result()
    gcs.set_quota(1500)
    with pytest.raises(ValueError, match="quota"):
        store.write("refused", bytes(1000)).result()
    assert store.list().result() == [b"kept"]
    store.write("kept", bytes(1400)).result()
    gcs.set_quota(None)
    store.write("refused", bytes(1000)).result()


def test_unavailable_server_is_asked_again(gcs, store):
    faults = [
        gcs.faults.add("status", operation="upload", status=503),
        gcs.faults.add("status", operation="media.get", status=429),
    ]
    store.write("key", b"value").result()
    assert store.read("key").result().value == b"value"
    assert [fault.fired for fault in faults] == [1, 1]


@pytest.mark.parametrize("kind", ["cut_download", "lost_response"])
def test_cut_download_is_asked_again_and_whole(gcs, store, kind):
    value = bytes(range(256)) * 4000
    store.write("key", value).result()
    fault = gcs.faults.add(kind, operation="media.get", nbytes=1000)
    assert store.read("key").result().value == value
    assert fault.fired == 1


def test_lost_answer_to_a_conditional_write_looks_like_a_lost_race(gcs, store):
    absent = store.read("key").result().stamp.generation
    gcs.faults.add("lost_response", operation="upload")
    assert not store.write("key", b"mine", if_equal=absent).result().generation
    assert store.read("key").result().value == b"mine"
