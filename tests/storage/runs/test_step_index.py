"""Indexes of steps: what goes in comes out, and no byte of one is believed that is another."""

import functools
import hashlib
import re
import tracemalloc
import zlib
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import (
    CorruptionError,
    Manifest,
    ObjectStore,
    SaveError,
    UnsupportedFormatError,
    parse_uri,
)
from cairn.storage.arrays.digests import parse_digest
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.runs.records.index_writer import PlacedShard, make_index
from cairn.storage.runs.records.layout import INDEX_FILE, manifest_file
from cairn.storage.runs.records.manifest import LeafRecord
from cairn.storage.runs.records.step_index import StepIndex, open_contents
from cairn.storage.store.open_files import open_files
from cairn.storage.store.records import RecordLocation
from tests.faults.report import trials
from tests.storage.indexes import parts_of, regions_of
from tests.storage.records import END, MAGIC, IndexDirectory, parse_index, shard_grid
from tests.storage.runs.random_steps import data_files, random_manifest, random_parts
from tests.storage.seams import paged_table, step_index

PLACE = RecordLocation("some-run", f"attempts/1/3/{INDEX_FILE}")


def ended(offset, stored, length=None):
    """A directory and what stands behind it."""
    length = len(stored) if length is None else length
    return stored + END.pack(offset, length, hashlib.sha256(stored).digest(), MAGIC)


def made(seed=0, leaves=12):
    """(file, manifest, what both were made of)."""
    return _made(seed, leaves, paged_table.PAGE_BYTES)


@functools.cache
def _made(seed, leaves, _page_bytes):
    rng = Random(seed)
    manifest, parts = random_manifest(rng), random_parts(rng, leaves)
    data, indexed = make_index(manifest, PLACE, **parts)
    return data, indexed, parts


def by_origin(shards):
    return [
        (one.origin, one.ref, one.digests.tobytes())
        for one in sorted(shards, key=lambda one: one.origin)
    ]


@pytest.fixture(params=["in one go", "by pages"])
def reading(request, monkeypatch):
    """Small indexes are read whole, larger ones by pages."""
    if request.param == "by pages":
        monkeypatch.setattr(step_index, "_WHOLE_BYTES", 0)
        monkeypatch.setattr(paged_table, "PAGE_BYTES", 256)
    return request.param


def stored(folder, data):
    """The folder of a step with this index."""
    uri = parse_uri(folder)
    ObjectStore(uri).write(INDEX_FILE, data)
    return uri


@settings(max_examples=trials(short=30, long=300))
@given(seed=st.integers(0, 2**32), leaves=st.integers(0, 30))
def test_an_index_holds_what_it_was_made_of(seed, leaves):
    rng = Random(seed)
    manifest, parts = random_manifest(rng), random_parts(rng, leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_table, "PAGE_BYTES", rng.choice([64, 256, 64 << 10]))
        data, indexed = make_index(manifest, PLACE, **parts)
        again, index = parse_index(data, "p", PLACE)
        assert again == indexed
        found = parts_of(index)
    assert indexed.model_copy(update={"index": None}) == manifest
    assert found["leaves"] == tuple(parts["leaves"])
    assert found["forms"] == parts["forms"]
    assert found["meta_digest"] == parts["meta_digest"]
    assert found["origins"] == parts["origins"]
    assert found["objects"] == tuple(sorted(parts["objects"], key=lambda one: one.name))
    assert found["shards"].keys() == parts["shards"].keys()
    for leaf, shards in parts["shards"].items():
        assert by_origin(found["shards"][leaf]) == by_origin(shards)
    ref = indexed.index
    assert (ref.leaves, ref.files) == (leaves, len(parts["objects"]))
    assert ref.nbytes == sum(one.size for one in parts["objects"])
    assert ref.size == len(data)


@pytest.mark.parametrize("seed", range(5))
def test_the_manifest_can_be_made_of_the_index(seed):
    data, indexed, _ = made(seed)
    name = RecordLocation("some-run", manifest_file(indexed.step, indexed.attempt))
    published = indexed.with_location(name).to_bytes()
    found, _ = parse_index(data, "p", PLACE)
    assert found.with_location(name).to_bytes() == published
    assert Manifest.parse(published, "p", name) == found


@pytest.mark.parametrize("seed", range(3))
def test_the_leaves_and_places_of_an_item_are_told_by_path(seed, tmp_path, reading):
    rng = Random(seed)
    manifest, parts = random_manifest(rng), random_parts(rng, 12)
    data, indexed = make_index(manifest, PLACE, **parts)
    index = open_contents(stored(tmp_path, data), indexed)
    assert isinstance(index, StepIndex)
    assert index.leaves == tuple(parts["leaves"])
    for leaf in parts["leaves"]:
        places = index.item(leaf.item)
        if leaf.shards is None:
            assert places.total(leaf.path) is None
            assert places.refs(leaf.path) == {}
            assert places.ref(leaf.path, (0,)) is None
            assert places.expected(leaf.path, (), ()) is None
            continue
        places.prefetch([leaf.path, "unknown"])
        assert places.total(leaf.path) == parse_digest(leaf.digest)
        refs, rank = places.refs(leaf.path), len(leaf.shards)
        assert {cell: places.ref(leaf.path, cell) for cell in refs} == refs
        grid, counts = shard_grid(leaf)
        assert set(refs) == set(np.ndindex(grid))
        for axis in range(rank):
            beyond = tuple(grid[axis] if at == axis else 0 for at in range(rank))
            assert places.ref(leaf.path, beyond) is None
            last = tuple(grid[at] * counts[at] if at == axis else 0 for at in range(rank))
            assert places.expected(leaf.path, leaf.chunks, last) is None
        assert places.ref(leaf.path, (*(0,) * rank, 0)) is None
        assert places.expected(leaf.path, leaf.chunks, (*(0,) * rank, 0)) is None
        if rank:
            assert places.ref(leaf.path, (-1, *(0,) * (rank - 1))) is None
        assert index.item("nothing").refs(leaf.path) == {}


def use(contents):
    """Ask an index for all that it knows."""
    found = parts_of(contents)
    totals = [contents.item(leaf.item).total(leaf.path) for leaf in contents.leaves]
    return (
        *(found[name] for name in ("leaves", "forms", "meta_digest", "objects", "origins")),
        {leaf: by_origin(shards) for leaf, shards in found["shards"].items()},
        totals,
    )


def flips(data, regions, apart=1):
    """Each byte of an index, or one of so many, another bit of each."""
    for name, (first, last) in regions.items():
        for at in range(first, last + 1, apart):
            changed = bytearray(data)
            changed[at] ^= 1 << (at * 5 % 8)
            yield name, bytes(changed)


def regions():
    """(first, last) byte of each part of the index."""
    data, indexed, _ = made()
    found = regions_of(indexed.index, parse_index(data, "p")[1].directory)
    assert set(found) == {"files", "values", "digests", "directory", "end"}
    return found


def test_each_flipped_bit_is_noticed_where_the_whole_index_is_read():
    data, indexed, _ = made()
    expected, same, errors = use(parse_index(data, "p")[1]), 0, []
    for _, changed in flips(data, regions()):
        try:
            manifest, index = parse_index(changed, "run/cairn.index", PLACE)
        except (CorruptionError, UnsupportedFormatError) as error:
            errors.append(str(error))
            continue
        # A bit of the compressed form alone: all is there, but it is not the file of the manifest.
        same += 1
        assert use(index) == expected
        assert manifest.index != indexed.index
    assert same <= 2
    assert len(errors) + same == len(data)
    assert [error for error in errors if "run/cairn.index" not in error] == []


def test_no_flipped_bit_is_believed_by_who_asks_for_parts(tmp_path, reading):
    data, indexed, _ = made()
    expected = use(open_contents(stored(tmp_path, data), indexed))
    tried, noticed, errors = Counter(), Counter(), []
    for name, changed in flips(data, regions(), apart=trials(short=3, long=1)):
        tried[name] += 1
        uri = stored(tmp_path, changed)
        try:
            found = use(open_contents(uri, indexed))
        except CorruptionError as error:
            errors.append(str(error))
            noticed[name] += 1
        else:
            # Nobody needs it who has the manifest.
            assert (name, reading) == ("end", "by pages")
            assert found == expected
    assert tried.keys() == regions().keys()
    assert noticed == Counter({**tried, **({"end": 0} if reading == "by pages" else {})})
    assert [error for error in errors if f"{tmp_path}/{INDEX_FILE}" not in error] == []


def test_an_index_that_is_cut_short_or_grown_is_an_error(tmp_path, reading):
    data, indexed, _ = made()
    expected = use(open_contents(stored(tmp_path, data), indexed))
    for size in (*range(0, len(data), 61), len(data) - 1):
        with pytest.raises((CorruptionError, UnsupportedFormatError), match=r"run/cairn\.index"):
            parse_index(data[:size], "run/cairn.index", PLACE)
        uri = stored(tmp_path, data[:size])
        if size < len(data) - END.size:
            with pytest.raises(CorruptionError, match=re.escape(f"{uri}/{INDEX_FILE}")):
                use(open_contents(uri, indexed))
    for more in (b"\0", data, data[-END.size :]):
        with pytest.raises((CorruptionError, UnsupportedFormatError), match="run/cairn"):
            parse_index(data + more, "run/cairn.index", PLACE)
        uri = stored(tmp_path, data + more)
        if reading == "by pages":  # what is behind it is not read
            assert use(open_contents(uri, indexed)) == expected
        else:
            with pytest.raises(CorruptionError, match=re.escape(f"{uri}/{INDEX_FILE}")):
                open_contents(uri, indexed)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\0" * 24, b"\0" * 16 + MAGIC, ended(0, b"", 0), b"x" * 5000,
     ended(0, b"junk"), ended(0, zlib.compress(b"[]")), ended(0, zlib.compress(b"{}")),
     ended(0, b"junk", 10), ended(2**64 - 1, b"", 2**64 - 1)],
)  # fmt: skip
def test_what_is_no_index_is_refused(data):
    with pytest.raises((CorruptionError, UnsupportedFormatError), match="run/cairn"):
        parse_index(data, "run/cairn.index")


def test_the_size_of_a_page_is_part_of_the_format():
    """No index tells it: with another, none of those that are stored could be read."""
    assert paged_table.PAGE_BYTES == 64 << 10
    rng = Random(7)
    data, _ = make_index(random_manifest(rng), PLACE, **random_parts(rng, 2000))
    values = parse_index(data, "p")[1].directory.values
    rows = (64 << 10) // 20
    assert len(values.pages) == -(-values.rows // rows) > 1
    first = data[values.offset : values.offset + rows * 20]
    assert values.pages[0] == hashlib.sha256(first).hexdigest()


def test_an_index_of_another_place_or_run_is_refused():
    data, _, _ = made()
    for place in (
        RecordLocation("some-run", f"attempts/2/3/{INDEX_FILE}"),
        RecordLocation("", "x"),
    ):
        with pytest.raises(CorruptionError, match="the step_index of another place"):
            parse_index(data, "p", place)
    with pytest.raises(CorruptionError, match="the step_index of another run"):
        parse_index(data, "p", RecordLocation("other-run", PLACE.key))
    parse_index(data, "p", RecordLocation(None, PLACE.key))


def test_an_index_of_another_step_is_refused_by_who_has_the_manifest(tmp_path, reading):
    (one, first, _), (two, second, _) = made(0), made(1)
    with pytest.raises(
        CorruptionError,
        match=r"cairn\.index: expected (a directory|the step's|[0-9]+ bytes with SHA-256)",
    ):
        open_contents(stored(tmp_path, two), first)
    # A manifest that names it all the same.
    forged = first.model_copy(update={"index": second.index})
    with pytest.raises(CorruptionError, match=rf"expected that of step {first.step} in attempt"):
        open_contents(stored(tmp_path, two), forged)
    open_contents(stored(tmp_path, one), first)


def test_an_index_that_is_gone_is_an_error_that_names_it(tmp_path, reading):
    data, indexed, _ = made()
    uri = parse_uri(tmp_path)
    expected = f"expected the step's index of {len(data)} bytes, found none"
    with pytest.raises(CorruptionError, match=rf"{re.escape(str(uri))}/cairn\.index: {expected}"):
        open_contents(uri, indexed)


def test_few_bytes_of_a_large_index_are_read_for_one_leaf(tmp_path, monkeypatch):
    monkeypatch.setattr(step_index, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(paged_table, "PAGE_BYTES", 128)
    rng = Random(3)
    manifest, parts = random_manifest(rng), random_parts(rng, 60)
    data, indexed = make_index(manifest, PLACE, **parts)
    uri = stored(tmp_path, data)
    contents = open_contents(uri, indexed)
    path = tmp_path / INDEX_FILE
    begin = indexed.index.directory[0]
    leaf = next(one for one in parts["leaves"] if one.shards is not None)
    # With nothing but zeros where the tables of all others lie, this leaf is still found.
    places = contents.item(leaf.item)
    places.prefetch([leaf.path])
    files = places.refs(leaf.path)
    path.write_bytes(bytes(begin) + data[begin:])
    assert places.total(leaf.path) == parse_digest(leaf.digest)
    assert places.refs(leaf.path) == files
    other = [one for one in parts["leaves"] if one.shards is not None][-1]
    with pytest.raises(CorruptionError, match=r"cairn\.index"):
        contents.item(other.item).total(other.path)


def test_who_wants_most_leaves_reads_a_large_index_in_one_request(tmp_path, monkeypatch):
    monkeypatch.setattr(step_index, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(paged_table, "PAGE_BYTES", 128)
    data, indexed, _ = made(2, 60)
    uri = stored(tmp_path, data)
    asked = []
    local_files = type(open_files(uri))
    reads = local_files.read_range
    monkeypatch.setattr(
        local_files, "read_range", lambda *given: asked.append(given[2:]) or reads(*given)
    )
    open_contents(uri, indexed).check()
    several = len(asked)
    asked.clear()
    open_contents(uri, indexed, whole=True).check()
    assert (several > 1, asked) == (True, [(0, len(data) + 1)])


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30])
def test_an_index_is_held_once(tmp_path, monkeypatch, whole_bytes):
    monkeypatch.setattr(step_index, "_WHOLE_BYTES", whole_bytes)
    shape = (64, 4096)
    leaf = LeafRecord(
        item="model", path="a", shape=shape, dtype="int8", chunks=(1, 1), shards=(1, shape[1])
    )
    records = [one for one in data_files(Random(0)) if one.name.startswith("model/")]
    ref = ValueRef(records[0].name, 0, 1)
    digests = np.arange(shape[0] * shape[1], dtype=np.uint64).reshape(shape)
    parts = {
        "leaves": [leaf],
        "forms": {},
        "meta_digest": None,
        "shards": {
            ("model", "a"): [PlacedShard((n, 0), ref, row) for n, row in enumerate(digests)]
        },
        "objects": records,
        "origins": {},
    }
    data, indexed = make_index(random_manifest(Random(0)), PLACE, **parts)
    uri = stored(tmp_path, data)
    open_contents(uri, indexed).check()  # what is made once stays
    tracemalloc.start()
    try:
        contents = open_contents(uri, indexed)
        contents.check()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert digests.nbytes < held < 1.3 * digests.nbytes


# Leaves that were not all written.


def without(parts, leaf, change):
    """The parts with other shards of a leaf."""
    shards = list(parts["shards"][leaf])
    return {**parts, "shards": {**parts["shards"], leaf: change(shards)}}


def of_many(parts):
    """Leaves that have several shards."""
    return [leaf for leaf, shards in parts["shards"].items() if len(shards) > 1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda shards: shards[1:], r"\d+ shards expected, found \d+"),
        (lambda shards: [], r"\d+ shards expected, found 0"),
        (lambda shards: [*shards, shards[0]], r"\d+ shards expected, found \d+"),
        (lambda shards: [shards[1], *shards[1:]], r"\d+ shards expected, found \d+"),
        (
            lambda shards: [shards[0]._replace(digests=np.zeros(99, np.uint64)), *shards[1:]],
            r"a shard at \[.*\] of 99 chunks",
        ),
        (
            lambda shards: [
                shards[0]._replace(origin=tuple(10**6 + at for at in shards[0].origin)),
                *shards[1:],
            ],
            r"a shard at \[10\d+.*\] of \d+ chunks",
        ),
        (
            lambda shards: [
                shards[0]._replace(ref=shards[0].ref._replace(file="model/d/other")),
                *shards[1:],
            ],
            "in model/d/other, which is not among the step's files",
        ),
    ],
    ids=["lost", "none", "twice", "one for another", "digests", "beyond", "elsewhere"],
)
def test_leaves_that_lack_shards_or_have_others_are_refused_and_named(change, problem):
    _, indexed, parts = made(4, 20)
    (item, path), *_ = leaves = of_many(parts)
    with pytest.raises(SaveError, match="leaves were not written") as caught:
        make_index(indexed, PLACE, **without(parts, (item, path), change))
    (found,) = caught.value.problems
    assert re.fullmatch(re.escape(f"{item}/{path}: ") + problem, found)
    assert "the step is not listed" in str(caught.value)
    for leaf in leaves[1:]:
        parts = without(parts, leaf, change)
    with pytest.raises(SaveError) as caught:
        make_index(indexed, PLACE, **parts)
    assert len(caught.value.problems) == len(leaves) - 1 > 1


def test_shards_of_no_leaf_are_left_out():
    _, indexed, parts = made()
    (leaf, shards), *_ = parts["shards"].items()
    manifest = indexed.model_copy(update={"index": None})
    more = {**parts["shards"], ("model", "gone"): shards}
    data, again = make_index(manifest, PLACE, **{**parts, "shards": more})
    assert (data, again) == made()[:2]
    assert leaf in parts["shards"]


# Indexes with a checksum that fits, that say what can't be.


def forged(change):
    """An index whose directory says something else."""
    data, indexed, _ = made()
    begin = indexed.index.directory[0]
    fields = change(parse_index(data, "p")[1].directory)
    directory = parse_index(data, "p")[1].directory.model_copy(update=fields)
    stored = zlib.compress(directory.to_bytes())
    return data[:begin] + ended(begin, stored)


def replaced(leaves, **fields):
    """The leaves, the first that has shards with other fields."""
    at = next(number for number, leaf in enumerate(leaves) if leaf.shards and leaf.shape)
    changed = LeafRecord.model_validate(leaves[at].model_dump() | fields)
    return (*leaves[:at], changed, *leaves[at + 1 :])


@pytest.mark.parametrize(
    "change",
    [
        lambda told: {"leaves": told.leaves[:-5]},
        lambda told: {"leaves": (*told.leaves, *told.leaves)},
        lambda told: {"leaves": replaced(told.leaves, shape=(10**12,) * 9)},
        lambda told: {"leaves": replaced(told.leaves, shards=(0,))},
        lambda told: {"leaves": replaced(told.leaves, chunks=(0,))},
        lambda told: {"leaves": replaced(told.leaves, shards=(), chunks=(1, 2, 3, 4, 5))},
        lambda told: {"values": told.values._replace(rows=told.values.rows - 1)},
        lambda told: {"digests": told.digests._replace(rows=10**15)},
        lambda told: {"values": told.digests},
        lambda told: {"files": told.files._replace(offset=7)},
        lambda told: {"files": told.files._replace(offset=10**15)},
        lambda told: {"folders": ()},
        lambda told: {"origins": ()},
        lambda told: {"folders": ("other/d",) * len(told.folders)},
    ],
)
def test_an_index_that_says_what_can_not_be_is_refused(change):
    with pytest.raises((CorruptionError, UnsupportedFormatError), match="run/cairn"):
        parse_index(forged(change), "run/cairn.index")


def test_chunks_of_another_alignment_are_of_a_newer_release():
    data, indexed, _ = made()
    directory = parse_index(data, "p")[1].directory
    body = directory.to_bytes()
    assert b'"chunk_alignment":1' in body
    changed = directory.model_copy(update={"chunk_alignment": 4096})
    with pytest.raises(UnsupportedFormatError, match="chunk_alignment"):
        IndexDirectory.parse(changed.to_bytes(), "p")
    assert indexed.index.files
