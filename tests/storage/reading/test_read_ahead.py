"""A local disk is asked for what will be read, and for nothing else; reads do not depend on it."""

import os
from pathlib import Path

import numpy as np
import pytest

from cairn import Checkpointer, CheckpointReader, CorruptionError, Run
from cairn.storage.reading.read_ahead import AHEAD_BYTES, ReadAhead, asked_ahead

STEP = 1
MIB = 1 << 20


def leaves():
    numbers = np.random.default_rng(0)
    return {name: numbers.standard_normal((40, 5000)).astype(np.float32) for name in "abcd"}


def reader_of(uri):
    with Checkpointer(str(uri)) as checkpointer:
        checkpointer.save(STEP, {"model": leaves()}, meta={}).wait()
    run = Run.open(str(uri))
    found = run.step(STEP)
    return CheckpointReader.open(run.uri / f"attempts/{found.attempt}/{STEP}", run.manifest(found))


@pytest.fixture
def asked(monkeypatch):
    """What the disk was asked for: bytes, in order."""
    found = []

    def advise(file, offset, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        found.append(os.pread(file, length, offset))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


def test_leaves_behind_the_one_that_is_read_are_asked_for_in_order_and_once(tmp_path, asked):
    reader, values = reader_of(tmp_path / "run"), leaves()
    reader.expect("model", ["b", "c", "a"])
    for name in ("b", "c", "a"):
        blocks = [*reader.iter_blocks("model", name, max_bytes=MIB, transpose=True)]
        assert np.array_equal(np.concatenate(blocks), values[name].T)
    ahead = [data for data in asked if len(data) >= values["a"].nbytes]
    order = [name for data in ahead for name in values if values[name].tobytes() in data]
    assert order == ["c", "a", "b", "c", "a"]  # two ahead of their turn; each in its turn
    assert not any(values["d"].tobytes() in data for data in asked)


def test_without_a_word_of_the_order_a_leaf_is_asked_for_alone(tmp_path, asked):
    reader, values = reader_of(tmp_path / "run"), leaves()
    list(reader.iter_blocks("model", "b", max_bytes=MIB))
    assert [name for name in values if values[name].tobytes() in b"".join(asked)] == ["b"]


def test_a_leaf_that_is_lost_is_told_by_the_one_who_reads_it_and_not_by_asking(tmp_path):
    reader = reader_of(tmp_path / "run")
    array = reader.arrays("model").array("b")
    for file in Path(reader.uri.local_path, "model").rglob("*"):
        if file.is_file() and file.stat().st_size > MIB // 2:
            file.unlink()
    array.ask((slice(0, 40), slice(0, 5000)))
    with pytest.raises(CorruptionError, match=": b"):
        list(reader.iter_blocks("model", "b", max_bytes=MIB))


def test_no_more_is_asked_for_than_the_bound():
    sizes = {f"{number}": 10 * MIB for number in range(20)}
    asked = []
    ahead = ReadAhead(sizes, sizes.__getitem__, asked.append)
    ahead.starts("0")
    assert asked == [f"{number}" for number in range(1, 1 + AHEAD_BYTES // (10 * MIB))]
    ahead.starts("1")
    assert asked[-1] == "7"
    assert len(asked) == len(set(asked)) == 7
    ahead.starts("unknown")
    ahead.starts("19")  # the last one
    assert len(asked) == 7


def test_a_leaf_beyond_the_bound_is_not_asked_for_and_neither_are_those_behind_it():
    sizes = {"a": 1, "b": AHEAD_BYTES + 1, "c": 1}
    asked = []
    ReadAhead(sizes, sizes.__getitem__, asked.append).starts("a")
    assert asked == []


def test_parts_come_in_their_order_each_asked_for_within_the_bound_of_its_turn():
    parts, asked, held = [30 * MIB] * 7, [], []
    for number, part in enumerate(asked_ahead(parts, int, asked.append)):
        assert part == 30 * MIB
        held.append(len(asked) - number)
    assert len(held) == 7
    assert max(held) * 30 * MIB <= AHEAD_BYTES + 30 * MIB
    assert held[0] == 3  # asked for beforehand
