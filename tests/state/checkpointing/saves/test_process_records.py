"""What each process tells of the item that it wrote a part of."""

from random import Random

import numpy as np
import pytest

from cairn import CorruptionError, ObjectStore, SaveError, UnsupportedFormatError
from cairn.storage.arrays.data_files import StoredFile, stored_file
from cairn.storage.arrays.ocdbt import ValueRef
from tests.state.seams import (
    ProcessRecord,
    WrittenShard,
    parse_records,
    read_records,
    record_file,
    records_to_bytes,
    remove_records,
)


def random_part(seed):
    rng, numbers = Random(seed), np.random.default_rng(seed)
    files = [
        stored_file(f"ocdbt.process_{seed}/d/{rng.randbytes(16).hex()}", rng.randbytes(n))
        for n in range(rng.randrange(1, 5))
    ]
    files.append(stored_file(f"array_metadatas/process_{seed}", b"{}"))
    shards = {}
    for number in range(rng.randrange(8)):
        rank = rng.randrange(4)
        origin = tuple(rng.randrange(2**40) for _ in range(rank))
        counts = tuple(rng.randrange(1, 4) for _ in range(rank))
        digests = numbers.integers(0, 2**64, counts, np.uint64)
        ref = ValueRef(rng.choice(files[:-1]).name, rng.randrange(2**40), rng.randrange(2**30))
        path = f"ü%2F/{number}"
        key = f"ü%2F.{number}/c/{number}".encode()
        shards[key] = WrittenShard(path, ref, origin, digests)
    return ProcessRecord(tuple(files), shards)


def told(part):
    """All of it, comparable; digests in C order."""
    return tuple(part.files), {
        key: (one.path, one.origin, one.ref, one.digests.reshape(-1).tolist())
        for key, one in part.shards.items()
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_part_comes_back_as_it_was(seed):
    parts = {"model": random_part(seed), "optimizer": random_part(seed + 100)}
    found = parse_records(records_to_bytes(parts), "p")
    assert [*found] == [*parts]
    for name, part in parts.items():
        assert told(found[name]) == told(part)
        assert all(isinstance(file, StoredFile) for file in found[name].files)
        assert all(one.digests.dtype == np.uint64 for one in found[name].shards.values())


def test_every_flipped_bit_of_a_part_is_an_error_that_names_it():
    data = records_to_bytes({"model": random_part(3)})
    for bit in range(0, 8 * len(data), 3):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptionError, UnsupportedFormatError), match="1/cairn"):
            parse_records(bytes(changed), "1/cairn.process_1.json")


def test_parts_of_all_processes_are_taken_and_their_records_removed(some_root_uri):
    objects = ObjectStore(some_root_uri)
    parts = {process: random_part(process) for process in range(1, 5)}
    for process, part in parts.items():
        objects.write(record_file(process), records_to_bytes({"model": part}))
    objects.write("manifest.ocdbt", b"stays")
    found = read_records(some_root_uri, range(1, 5))
    assert [told(part["model"]) for part in found] == [told(part) for part in parts.values()]
    remove_records(some_root_uri, range(1, 5))
    assert objects.list() == ["manifest.ocdbt"]


def test_a_process_that_told_nothing_is_named_and_no_record_is_removed(some_root_uri):
    objects = ObjectStore(some_root_uri)
    for process in (1, 3):
        objects.write(record_file(process), records_to_bytes({"model": random_part(process)}))
    with pytest.raises(SaveError, match=r"found no cairn\.process_2\.json, cairn\.process_4\.json"):
        read_records(some_root_uri, range(1, 5))
    assert objects.list() == [record_file(1), record_file(3)]


def test_a_damaged_record_of_a_process_is_an_error_that_names_it(some_root_uri):
    objects = ObjectStore(some_root_uri)
    data = bytearray(records_to_bytes({"model": random_part(1)}))
    data[len(data) // 2] ^= 4
    objects.write(record_file(1), bytes(data))
    with pytest.raises((CorruptionError, UnsupportedFormatError), match=r"cairn\.process_1\.json"):
        read_records(some_root_uri, [1])
