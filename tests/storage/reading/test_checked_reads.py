"""Reads that compare digests, of arrays in memory and of whole steps."""

import itertools
from collections import Counter
from pathlib import Path

import google_crc32c
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import Checkpointer, CheckpointReader, CorruptionError, ObjectStore, Run, parse_uri
from cairn.storage.arrays.chunk_digests import FILE_PREFIX, ChunkDigests, DigestedBox
from cairn.storage.arrays.digests import digest_chunks, digest_text
from cairn.storage.reading.block_stream import BlockPlan, stream_blocks
from cairn.storage.reading.checked_reads import CheckedReads
from cairn.storage.runs.records.step_index import open_contents
from tests.storage.plain_steps import as_plain_step, record_of

STEP = 3


class Recorded:
    """A TensorStore array that keeps the sizes of what was read of it."""

    def __init__(self, array):
        self.array = ts.array(array)
        self.sizes = []

    def __getitem__(self, index):
        part = self.array[index]
        self.sizes.append(part.size)
        return part


class Checks:
    """The digests of an array, and which chunks were compared with them."""

    def __init__(self, array, chunks):
        self.digests = digest_chunks(array, (0,) * array.ndim, chunks)
        self.compared = []

    def __call__(self, index, found):
        self.compared.append(index)
        if int(self.digests[index]) != found:
            raise CorruptionError(path=index)


def checked(array, chunks, *, limit=None):
    stored, checks = Recorded(array), Checks(array, chunks)
    reads = CheckedReads(stored, array.shape, chunks, array.itemsize, checks)
    reads.limit = limit or reads.limit
    return reads, stored, checks


@st.composite
def indexed(draw):
    """(array, chunk shape, index with an integer or explicit slice for each axis)."""
    shape = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    chunks = tuple(draw(st.integers(1, size + 1)) for size in shape)
    index: list[int | slice] = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start, size))
        part = slice(start, stop, draw(st.integers(1, 4)))
        index.append(start if draw(st.booleans()) else part)
    array = np.random.default_rng(0).standard_normal(shape, np.float32)
    return np.asarray(array, ml_dtypes.bfloat16), chunks, tuple(index)


@settings(deadline=None)
@given(indexed(), st.integers(1, 60))
def test_any_part_is_that_of_numpy_and_only_chunks_read_are_compared(case, limit):
    array, chunks, index = case
    reads, stored, checks = checked(array, chunks, limit=limit)
    found = reads[index].read(order="C").result()
    expected = np.asarray(array[index])
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()
    assert found.flags.c_contiguous
    positions = [np.arange(size)[part] for size, part in zip(array.shape, index, strict=True)]
    touched = itertools.product(
        *({int(at) // chunk for at in np.atleast_1d(p)}
          for p, chunk in zip(positions, chunks, strict=True))
    )  # fmt: skip
    assert {*touched} <= {*checks.compared}
    assert len(checks.compared) == len({*checks.compared})
    whole = int(np.prod(chunks, dtype=int))
    assert max(stored.sizes) <= max(limit, whole, expected.size)


def test_part_of_a_large_array_is_read_in_small_pieces():
    array = np.arange(64 * 640, dtype=np.float32).reshape(64, 640)
    reads, stored, checks = checked(array, (8, 64), limit=1024)
    found = reads[slice(0, 64), slice(3, 4)].read().result()
    assert found.tobytes() == np.ascontiguousarray(array[:, 3:4]).tobytes()
    assert max(stored.sizes) == 1024
    assert sorted(checks.compared) == [(row, 0) for row in range(8)]


def test_changed_element_outside_of_the_part_but_in_its_chunk_is_found():
    array = np.zeros((8, 8), np.float32)
    reads, stored, _ = checked(array, (4, 4))
    stored.array[3, 3].write(1e-30).result()
    for index in ((0, 0), (slice(0, 8), slice(0, 8)), (slice(0, 1), slice(0, 2))):
        with pytest.raises(CorruptionError, match=r"\(0, 0\)"):
            reads[index].read().result()
    assert not reads[slice(4, 8), slice(0, 8)].read().result().any()


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
@pytest.mark.parametrize("max_bytes", [64, 5000, 1 << 20])
def test_streaming_compares_each_chunk_once(axes, max_bytes):
    array = np.random.default_rng(0).standard_normal((40, 60), np.float32)
    reads, _, checks = checked(array, (16, 7))
    plan = BlockPlan((slice(0, 40), slice(0, 60)), (16, 7), axes, 0, 4, max_bytes)
    blocks = list(stream_blocks(reads, plan, lambda pending: pending.result()))
    joined = np.concatenate([block.reshape(-1) for block in blocks])
    assert joined.tobytes() == array.transpose(axes).tobytes()
    assert sorted(checks.compared) == [*np.ndindex(3, 9)]


def leaves_of(seed=0):
    """Leaves of every form, and with one or many chunks."""
    numbers = np.random.default_rng(seed)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("b", "a")
    place = jax.sharding.NamedSharding(mesh, spec)
    codes = numbers.integers(0, 16, (16, 8))
    return {
        "matrix": jax.device_put(numbers.standard_normal((64, 48), np.float32), place),
        "half": jax.device_put(numbers.standard_normal((8, 6)).astype(jnp.bfloat16), place),
        "scalar": np.float64(numbers.random()),
        "packed": jax.device_put(jnp.asarray(codes, jnp.uint4), place),
        "packed_signed": jnp.asarray(codes - 8, jnp.int4),
        "widened": jnp.asarray(codes[:3, :3], jnp.uint4),
        "bits": np.asarray(codes, np.float32).astype(ml_dtypes.float8_e4m3),
        "keys": jax.random.split(jax.random.key(seed), 6),
        "key": jax.random.key(seed),
        "truth": np.asarray(codes[0] > 7),
        "empty": np.zeros((0, 2), np.float32),
    }


OWN_FORMS = {"packed", "packed_signed", "widened", "bits", "empty"}
"""Leaves that Cairn stores in another form than plain Orbax."""


def arrays_of(leaves):
    """The leaves as the reader reads them."""
    return {
        path: np.asarray(
            jax.random.key_data(leaf)
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in leaves.items()
    }


def saved(uri, leaves):
    """(step folder, manifest) of a step."""
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(STEP, {"model": leaves}, meta={}).wait()
    run = Run.open(uri)
    return run.step_uri(run.step(STEP)), run.manifest(run.step(STEP))


def saved_before(uri, leaves):
    """(step folder, manifest) of a copy of an adopted step, whose digests lie in files."""
    step_uri, _ = saved(uri, leaves)
    run = Run.open(uri)
    return step_uri, as_plain_step(run, run.step(STEP))


def boxes_of(array, chunks):
    """The digests of an array's chunks in two boxes, as two processes would write them."""
    cut = chunks[0] * max(1, array.shape[0] // chunks[0] // 2) if chunks else 0
    rest = (0,) * max(0, array.ndim - 1)
    parts = {(0, *rest): array[:cut], (cut, *rest): array[cut:]} if chunks else {(): array}
    for origin, part in parts.items():
        if part.size:
            found = digest_chunks(part, origin, chunks)
            yield DigestedBox(origin, found.shape, found)


def with_digests(step_uri, manifest, arrays, *, leave_out=()):
    """The manifest of a step to which digests of `arrays` are added, in the files of two processes.

    Those that are there already are replaced.
    """
    files: list[dict[str, list[DigestedBox]]] = [{}, {}]
    for record in manifest.inline_leaves:
        if record.chunks is not None and record.path not in leave_out:
            for number, box in enumerate(boxes_of(arrays[record.path], record.chunks)):
                files[number].setdefault(record.path, []).append(box)
    objects = {one.name: one for one in manifest.inline_objects if FILE_PREFIX not in one.name}
    for number, boxes in enumerate(files):
        name = f"model/{FILE_PREFIX}{number}.json"
        data = ChunkDigests(boxes).to_bytes()
        ObjectStore(step_uri).write(name, data)
        objects[name] = record_of(name, data)
    all_of_them = ChunkDigests(files[0]).merged(ChunkDigests(files[1]))
    totals = {path: all_of_them.total(path) for path in all_of_them.paths}
    leaves = tuple(
        one.model_copy(update={"digest": digest_text(totals[one.path])})
        if one.path in totals
        else one
        for one in manifest.inline_leaves
    )
    return manifest.model_copy(
        update={"inline_objects": tuple(objects.values()), "inline_leaves": leaves}
    )


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """(step folder, manifest without digests, the leaves as read) of a step."""
    leaves = {path: leaf for path, leaf in leaves_of().items() if path not in OWN_FORMS}
    uri = parse_uri(tmp_path_factory.mktemp("checked")) / "run"
    return *saved_before(uri, leaves), arrays_of(leaves)


def elements_of(arrays):
    """How often there is each element, by its bytes."""
    return Counter(one.tobytes() for array in arrays for one in np.asarray(array).reshape(-1))


def test_every_form_of_leaf_is_checked_and_read_bit_equal(step):
    step_uri, manifest, arrays = step
    reader = CheckpointReader.open(step_uri, with_digests(step_uri, manifest, arrays))
    for path, array in arrays.items():
        found = reader.read("model", path)
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        assert found.tobytes() == array.tobytes()
        for transpose in (False, True):
            blocks = reader.iter_blocks("model", path, max_bytes=99, transpose=transpose)
            joined = b"".join(block.tobytes() for block in blocks)
            assert joined == (array.T if transpose else array).tobytes()
        assert elements_of(reader.iter_pieces("model", path)) == elements_of([array])
    for index in (5, -1, (slice(3, 50, 7), 20), (slice(17, 33), slice(20, 30)), slice(9, 9)):
        expected = np.ascontiguousarray(arrays["matrix"][index])
        found = reader.read("model", "matrix", index)
        assert (found.shape, found.tobytes()) == (expected.shape, expected.tobytes())
    for index in (5, (slice(3, 50), 20), (slice(17, 33), slice(20, 30)), slice(9, 9)):
        pieces = reader.iter_pieces("model", "matrix", index=index)
        assert elements_of(pieces) == elements_of([arrays["matrix"][index]])


FORMS = ("matrix", "half", "scalar", "keys", "truth")


@pytest.mark.parametrize("path", [*FORMS, "key"])
def test_leaf_that_is_not_what_was_digested_is_named(step, path):
    step_uri, manifest, arrays = step
    changed = arrays[path].reshape(-1).copy()
    changed.view(np.uint8)[-1] ^= 1
    changed = changed.reshape(arrays[path].shape)
    other = with_digests(step_uri, manifest, {**arrays, path: changed})
    reader = CheckpointReader.open(step_uri, other)
    with pytest.raises(CorruptionError, match=rf"is not what was saved: .*model: {path}, chunk \["):
        reader.read("model", path)
    with pytest.raises(CorruptionError, match=rf"model: {path}, chunk"):
        list(reader.iter_blocks("model", path, max_bytes=64))
    with pytest.raises(CorruptionError, match=rf"model: {path}, chunk"):
        list(reader.iter_pieces("model", path))
    sound = next(other for other in arrays if other != path)
    assert reader.read("model", sound).tobytes() == arrays[sound].tobytes()


def test_chunks_that_changed_places_are_both_found(step):
    step_uri, manifest, arrays = step
    swapped = arrays["matrix"].copy()
    swapped[:16, :24], swapped[48:, 24:] = arrays["matrix"][48:, 24:], arrays["matrix"][:16, :24]
    other = with_digests(step_uri, manifest, {**arrays, "matrix": swapped})
    reader = CheckpointReader.open(step_uri, other)
    with pytest.raises(CorruptionError, match=r"matrix, chunk \[0, 0\]"):
        reader.read("model", "matrix", (2, 3))
    with pytest.raises(CorruptionError, match=r"matrix, chunk \[3, 1\]"):
        reader.read("model", "matrix", (63, 47))
    part = (slice(16, 48), slice(None))
    assert reader.read("model", "matrix", part).tobytes() == arrays["matrix"][part].tobytes()


def test_nothing_of_a_wrong_chunk_is_handed_out_by_a_stream(step):
    step_uri, manifest, arrays = step
    changed = arrays["matrix"].copy()
    changed[50, 30] += 1
    reader = CheckpointReader.open(
        step_uri, with_digests(step_uri, manifest, {**arrays, "matrix": changed})
    )
    handed_out = []
    with pytest.raises(CorruptionError, match=r"chunk \[3, 1\]"):
        handed_out.extend(reader.iter_blocks("model", "matrix", max_bytes=500))
    joined = b"".join(block.tobytes() for block in handed_out)
    assert arrays["matrix"][:48].tobytes().startswith(joined)


@pytest.mark.parametrize("save", [saved, saved_before])
def test_stored_chunks_that_changed_places_with_their_checksums_are_found(tmp_path, save):
    array = leaves_of()["matrix"]
    step_uri, manifest = save(parse_uri(tmp_path / "run"), {"w": array})
    shards = [np.asarray(shard.data).tobytes() for shard in array.addressable_shards[:2]]
    files = [path for path in Path(step_uri.local_path).rglob("*") if path.is_file()]
    places = [
        (path, path.read_bytes().index(data), len(data) + 4)  # the crc32c comes after the data
        for data in shards
        for path in files
        if data in path.read_bytes()
    ]
    stored = [path.read_bytes()[at : at + size] for path, at, size in places]
    checksums = [google_crc32c.value(path.read_bytes()) for path in files]
    for (path, at, size), other in zip(places, reversed(stored), strict=True):
        content = path.read_bytes()
        path.write_bytes(content[:at] + other + content[at + size :])
    # Bytes followed by their own crc32c do to another crc32c what all such bytes do.
    assert checksums == [google_crc32c.value(path.read_bytes()) for path in files]
    unchecked = CheckpointReader.open(step_uri).read("model", "w")
    assert unchecked.tobytes() != np.asarray(array).tobytes()
    for read in (
        lambda reader: reader.read("model", "w"),
        lambda reader: list(reader.iter_blocks("model", "w", max_bytes=100)),
        lambda reader: list(reader.iter_pieces("model", "w")),
    ):
        with pytest.raises(CorruptionError, match=r"model: w, chunk \["):
            read(CheckpointReader.open(step_uri, manifest))


def test_leaf_without_digests_is_refused_where_others_have_them(step):
    step_uri, manifest, arrays = step
    partial = with_digests(step_uri, manifest, arrays, leave_out=("matrix",))
    reader = CheckpointReader.open(step_uri, partial)
    with pytest.raises(CorruptionError, match="model: matrix: expected digests of its chunks"):
        reader.read("model", "matrix")
    with pytest.raises(CorruptionError, match="model: matrix"):
        reader.iter_blocks("model", "matrix", max_bytes=100)
    assert reader.read("model", "half").tobytes() == arrays["half"].tobytes()


def test_digests_that_are_not_the_manifests_are_refused(step):
    step_uri, manifest, arrays = step
    other = with_digests(step_uri, manifest, arrays)
    leaves = tuple(
        one.model_copy(update={"digest": digest_text(7)}) if one.path == "half" else one
        for one in other.inline_leaves
    )
    reader = CheckpointReader.open(step_uri, other.model_copy(update={"inline_leaves": leaves}))
    with pytest.raises(CorruptionError, match=r"model: half: expected keyed-sum-64:0{15}7"):
        reader.read("model", "half")


def test_missing_file_of_digests_is_corrupt_and_named(tmp_path):
    leaves = {"w": jnp.arange(4.0)}
    step_uri, manifest = saved_before(parse_uri(tmp_path / "run"), leaves)
    other = with_digests(step_uri, manifest, arrays_of(leaves))
    reader = CheckpointReader.open(step_uri, other)
    ObjectStore(step_uri).delete(f"model/{FILE_PREFIX}0.json")
    with pytest.raises(CorruptionError, match=r"model/chunk_digests\.process_0\.json"):
        reader.read("model", "w")


def test_listing_leaves_needs_no_digests(step):
    step_uri, manifest, arrays = step
    reader = CheckpointReader.open(step_uri, with_digests(step_uri, manifest, arrays))
    assert reader.leaves("model").keys() == arrays.keys()
    assert (
        CheckpointReader.open(step_uri).read("model", "half").tobytes() == arrays["half"].tobytes()
    )


def test_steps_are_checked_in_every_store(root_uri):
    leaves = {"w": np.arange(12, dtype=np.float32)}
    step_uri, manifest = saved_before(root_uri / "run", leaves)
    sound = CheckpointReader.open(step_uri, with_digests(step_uri, manifest, leaves))
    assert sound.read("model", "w").tobytes() == leaves["w"].tobytes()
    wrong = with_digests(step_uri, manifest, {"w": leaves["w"][::-1]})
    with pytest.raises(CorruptionError, match="model: w, chunk"):
        CheckpointReader.open(step_uri, wrong).read("model", "w")


def test_every_form_of_leaf_is_read_by_the_index_of_the_step(root_uri):
    leaves = leaves_of()
    step_uri, manifest = saved(root_uri / "run", leaves)
    assert manifest.index is not None
    reader = CheckpointReader.open(step_uri, manifest)
    assert reader.leaves("model").keys() == leaves.keys()
    for path, array in arrays_of(leaves).items():
        found = reader.read("model", path)
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        assert found.tobytes() == array.tobytes()
        blocks = reader.iter_blocks("model", path, max_bytes=99, transpose=True)
        assert b"".join(block.tobytes() for block in blocks) == array.T.tobytes()


@pytest.mark.parametrize("path", [*FORMS, "key"])
def test_values_of_another_leaf_with_their_own_checksums_are_found_and_named(tmp_path, path):
    leaves = {"one": leaves_of(0)[path], "two": leaves_of(1)[path], "sound": np.arange(3.0)}
    step_uri, manifest = saved(parse_uri(tmp_path / "run"), leaves)
    places = open_contents(step_uri, manifest).item("model")
    second = places.refs("two")
    for cell, ref in places.refs("one").items():
        swap(Path(step_uri.local_path) / "model", ref, second[cell])
    arrays = arrays_of(leaves)
    unchecked = CheckpointReader.open(step_uri)
    assert unchecked.read("model", "one").tobytes() == arrays["two"].tobytes()
    reader = CheckpointReader.open(step_uri, manifest)
    for name in ("one", "two"):
        with pytest.raises(CorruptionError, match=rf"not what was saved: .*model: {name}, chunk"):
            reader.read("model", name)
        with pytest.raises(CorruptionError, match=rf"model: {name}, chunk \["):
            list(reader.iter_blocks("model", name, max_bytes=64))
    assert reader.read("model", "sound").tobytes() == arrays["sound"].tobytes()


def swap(folder, one, two):
    """Exchange two values of equal length."""
    assert one.length == two.length
    stored = [(folder / ref.file).read_bytes()[ref.offset :][: ref.length] for ref in (two, one)]
    for ref, value in zip((one, two), stored, strict=True):
        content = bytearray((folder / ref.file).read_bytes())
        content[ref.offset : ref.offset + ref.length] = value
        (folder / ref.file).write_bytes(content)
