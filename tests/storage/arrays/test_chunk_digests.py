import json

import numpy as np
import pytest

from cairn import CorruptionError
from cairn.storage.arrays.chunk_digests import ChunkDigests, DigestedBox
from cairn.storage.arrays.digests import digest_chunks

ARRAY = np.random.default_rng(0).standard_normal((10, 6), dtype=np.float32)
CHUNKS = (4, 2)


def box(origin, array=ARRAY):
    """The chunks of `ARRAY` from `origin` on, as one process writes them."""
    found = digest_chunks(array, origin, CHUNKS)
    return DigestedBox(tuple(origin), found.shape, found)


def halves():
    left, right = ARRAY[:, :4], ARRAY[:, 4:]
    return box((0, 0), left), box((0, 4), right)


def whole():
    return digest_chunks(ARRAY, (0, 0), CHUNKS)


def file_with(**changes):
    body = json.loads(ChunkDigests({"w": [box((0, 0))]}).to_bytes())
    return json.dumps({**body, **changes}).encode()


def test_what_is_written_is_read_back():
    scalar = DigestedBox((), (), np.array(7, np.uint64))
    written = ChunkDigests({"a/w": halves(), "s": [scalar]})
    found = ChunkDigests.parse(written.to_bytes(), path="f")
    assert found.to_bytes() == written.to_bytes()
    assert found.paths == {"a/w", "s"}
    assert found.total("s") == found.expected("s", (), ()) == 7
    for index in np.ndindex(3, 3):
        assert found.expected("a/w", CHUNKS, index) == whole()[index]


def test_file_is_json_that_names_its_format():
    body = json.loads(ChunkDigests({"w": [box((0, 0))]}).to_bytes())
    assert (body["format"], body["version"]) == ("cairn.chunk_digests", 1)
    (record,) = body["leaves"]["w"]
    assert (record["origin"], record["counts"]) == ([0, 0], [3, 3])
    assert bytes.fromhex(record["digests"]) == whole().astype("<u8").tobytes()


def test_files_of_all_processes_together_cover_a_leaf():
    first, second = halves()
    merged = ChunkDigests({"w": [first]}).merged(ChunkDigests({"w": [second], "v": [first]}))
    alone = ChunkDigests({"w": [box((0, 0))]})
    assert merged.paths == {"w", "v"}
    assert merged.total("w") == alone.total("w")
    assert merged.total("v") == ChunkDigests({"w": [first]}).total("w")
    for index in np.ndindex(3, 3):
        assert merged.expected("w", CHUNKS, index) == alone.expected("w", CHUNKS, index)


def test_chunks_that_are_not_covered_have_no_digest():
    left = ChunkDigests({"w": halves()[:1], "none": []})
    assert left.expected("w", CHUNKS, (0, 1)) is not None
    assert left.expected("w", CHUNKS, (0, 2)) is None
    assert left.expected("w", CHUNKS, (3, 0)) is None
    right = ChunkDigests({"w": halves()[1:]})
    assert right.expected("w", CHUNKS, (0, 2)) is not None
    assert right.expected("w", (4, 3), (0, 2)) is None
    assert left.expected("w", (4,), (0,)) is None
    assert left.expected("other", CHUNKS, (0, 0)) is None
    assert left.total("other") is None
    assert left.total("none") is None
    assert left.paths == {"w"}


def test_chunk_in_two_boxes_has_no_digest():
    overlapping = ChunkDigests({"w": [box((0, 0)), box((4, 0), ARRAY[4:])]})
    assert overlapping.expected("w", CHUNKS, (0, 0)) is not None
    assert overlapping.expected("w", CHUNKS, (1, 0)) is None


def test_the_same_chunks_twice_are_refused():
    alone = ChunkDigests({"w": [box((0, 0))]})
    with pytest.raises(CorruptionError, match="w: expected each chunk once"):
        alone.merged(alone)


RECORD = {"origin": [0], "counts": [1], "digests": "0" * 16}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        file_with(format="cairn.manifest"),
        file_with(version=2),
        file_with(version=True),
        file_with(leaves=[]),
        file_with(leaves={"w": {}}),
        file_with(leaves={"w": [[]]}),
        file_with(leaves={"w": [{}]}),
        file_with(leaves={"w": [{**RECORD, "digests": "0" * 15}]}),
        file_with(leaves={"w": [{**RECORD, "digests": "x" * 16}]}),
        file_with(leaves={"w": [{**RECORD, "digests": None}]}),
        file_with(leaves={"w": [{**RECORD, "counts": [2]}]}),
        file_with(leaves={"w": [{**RECORD, "counts": [0], "digests": ""}]}),
        file_with(leaves={"w": [{**RECORD, "counts": [2**70, 0], "origin": [0, 0]}]}),
        file_with(leaves={"w": [{**RECORD, "counts": [1, 1]}]}),
        file_with(leaves={"w": [{**RECORD, "origin": [-1]}]}),
        file_with(leaves={"w": [{**RECORD, "origin": [True]}]}),
        file_with(leaves={"w": [{**RECORD, "origin": [2**63]}]}),
        file_with(leaves={"w": [{**RECORD, "origin": "0"}]}),
        file_with(leaves={"w": [RECORD, RECORD]}),
        file_with(leaves={"w": [RECORD, {"origin": [], "counts": [], "digests": "0" * 16}]}),
    ],
    ids=lambda data: data[-60:].decode(errors="replace"),
)
def test_damaged_file_is_corrupt_and_named(data):
    with pytest.raises(CorruptionError, match=r"model/chunk_digests\.process_0\.json") as caught:
        ChunkDigests.parse(data, path="model/chunk_digests.process_0.json")
    assert caught.value.next_step
