"""Values in a bucket are asked for in ranges: neighbours at once, many at a time, in a budget."""

import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import Checkpointer, CorruptionError, load, parse_uri
from cairn.storage.reading import remote_shards
from cairn.storage.reading.remote_shards import Piece
from tests.gcs.impatience import impatient
from tests.state.checkpointing.saves.test_round_trips import rounds

VALUES = r"attempts/\d+/\d+/\w+/d/"
LEAVES, SIDE = 120, 64

spans = st.tuples(st.sampled_from("ab"), st.integers(0, 1 << 26), st.integers(1, 1 << 24))


@given(st.lists(spans, max_size=30))
def test_each_piece_is_asked_for_once_with_what_lies_beside_it(spans):
    pieces = [Piece(file, at, at + size, "", len) for file, at, size in spans]
    runs = list(remote_shards.gathered(pieces))
    assert sorted(one for run in runs for one in run) == list(range(len(pieces)))
    for run in runs:
        own = [pieces[one] for one in run]
        assert len({one.file for one in own}) == 1
        starts = [one.start for one in own]
        assert starts == sorted(starts)
        whole = max(one.stop for one in own) - starts[0]
        assert len(run) == 1 or whole <= remote_shards.REQUEST_BYTES
        read = {at for one in own for at in (one.start, one.stop)}
        assert min(read) == starts[0]


def leaves(seed=0):
    numbers = np.random.default_rng(seed)
    return {f"leaf{n}": numbers.standard_normal((SIDE, SIDE)) for n in range(LEAVES)}


def save(uri):
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(1, {"model": leaves()}, meta={}).wait()


@pytest.fixture
def saved(gcs, copies):
    uri = f"{gcs.bucket_uri}/root/run"
    copies.put(save, parse_uri(uri))
    gcs.server.requests.clear()
    return uri


def loaded(uri):
    found = load(uri, {"model": leaves(1)})["model"]
    assert jax.tree.all(jax.tree.map(np.array_equal, found, leaves()))


def asked(gcs):
    return [one for one in gcs.server.requests if "/d/" in one.name and one.bucket == gcs.bucket]


def test_many_small_leaves_are_few_requests(gcs, saved):
    loaded(saved)
    assert 1 <= len(asked(gcs)) <= 2


def test_as_many_requests_as_there_are_leaves_are_on_their_way_at_a_time(gcs, saved, monkeypatch):
    monkeypatch.setattr(remote_shards, "REQUEST_BYTES", 1)
    held = gcs.faults.add("hold", count=None, operation="media.get", name=VALUES)
    reading = threading.Thread(target=loaded, args=(saved,))
    reading.start()
    held.wait(times=100)
    held.release()
    reading.join()
    assert len(asked(gcs)) >= LEAVES


def test_what_is_on_its_way_is_within_a_budget(gcs, saved, monkeypatch):
    monkeypatch.setattr(remote_shards, "REQUEST_BYTES", 1)
    monkeypatch.setattr(remote_shards, "BUDGET_BYTES", 1)
    loaded(saved)
    assert len(asked(gcs)) == rounds(asked(gcs)) >= LEAVES


@pytest.mark.parametrize("at", [10, -10], ids=["a value", "the end"])
def test_a_flipped_bit_is_named_by_its_leaf(gcs, saved, at):
    (name,) = [name for name in gcs.names() if "/model/d/" in name]
    file = gcs.file(name)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.unlink()  # other copies of the run have it too
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"model: leaf\d+, chunk \[0, 0\]"):
        load(saved, {"model": leaves(1)})


def test_an_answer_that_ends_early_is_named_by_a_leaf(gcs, saved):
    (name,) = [name for name in gcs.names() if "/model/d/" in name]
    whole = gcs.file(name).read_bytes()
    ends = {"nbytes": len(whole) // 2, "count": None}
    gcs.faults.add("truncate", operation="media.get", name=VALUES, **ends)
    with pytest.raises(CorruptionError, match=r"model: leaf\d+"):
        load(saved, {"model": leaves(1)})


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 503, "count": 3},
        {"kind": "cut_download", "nbytes": 100_000},
        {"kind": "cut_download", "nbytes": 0, "count": 2},
        {"kind": "truncate", "nbytes": 100_000},
        {"kind": "lost_response"},
    ],
    ids=lambda fault: fault["kind"],
)
def test_what_does_not_arrive_at_once_is_asked_for_again(gcs, saved, fault):
    gcs.faults.add(**fault, operation="media.get", name=VALUES)
    with impatient():
        loaded(saved)
    assert len(asked(gcs)) > 1


def test_an_object_that_is_gone_is_named(gcs, saved):
    (name,) = [name for name in gcs.names() if "/model/d/" in name]
    gcs.server.store.bucket(gcs.bucket).delete(name)
    with pytest.raises(CorruptionError, match=r"stored data of a leaf is missing|no such file"):
        load(saved, {"model": leaves(1)})


def test_pieces_that_overlap_are_asked_for_apart():
    pieces = [Piece("a", at, at + 10, "", len) for at in (0, 5, 15)]
    assert list(remote_shards.gathered(pieces)) == [[0], [1, 2]]
