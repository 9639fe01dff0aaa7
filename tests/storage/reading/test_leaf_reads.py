"""Leaves of saved steps, put together in any parts, on a disk and in an object store."""

import itertools
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from cairn import Checkpointer, CheckpointReader, CorruptionError, ObjectStore, Run, parse_uri
from cairn.storage.arrays.box_buffers import BoxBuffer, aligned_empty
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.reading.leaf_reads import LeafReads
from tests.storage.parts import inside
from tests.storage.plain_steps import as_plain_step
from tests.storage.seams import chunks as chunk_shape
from tests.storage.seams import data_file_writers
from tests.storage.states import floats, put, raw


def leaves():
    """Leaves of every form, some of them in several shards of several chunks."""
    codes = np.random.default_rng(0).integers(0, 16, (16, 8))
    return {
        "rows": put(floats(64, 48), "fsdp", None),
        "columns": put(floats(32, 64, seed=1).astype(ml_dtypes.bfloat16), None, "fsdp"),
        "both": put(floats(16, 8, seed=2), "dp", "fsdp"),
        "replicated": put(floats(48, 3, seed=3)),
        "vector": put(floats(1000, seed=4)),
        "scalar": np.float64(0.1),
        "count": put(np.int32(7)),
        "packed": put(jnp.asarray(codes, jnp.uint4), "dp", None),
        "widened": jnp.asarray(codes[:3, :3], jnp.uint4),
        "bits": np.asarray(codes, np.float32).astype(ml_dtypes.float8_e4m3),
        "mask": put(codes > 7, "dp", "fsdp"),
        "keys": jax.random.split(jax.random.key(0), 6),
    }


def on_host(leaf):
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


LEAVES = sorted(leaves())
OWN_FORMS = {"packed", "widened", "bits"}


@pytest.fixture(scope="module")
def small():
    """Small shards, chunks and files: a small leaf has several of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_shape, "SHARD_BYTES", 1024)
        patch.setattr(chunk_shape, "CHUNK_BYTES", 256)
        patch.setattr(chunk_shape, "MIN_CHUNK_BYTES", 16)
        patch.setattr(data_file_writers, "FILE_BYTES", 4096)
        patch.setattr(data_file_writers, "REMOTE_FILE_BYTES", 4096)
        yield


def save_indexed(uri):
    with Checkpointer(uri, writer_id="job") as checkpointer:
        checkpointer.save(1, {"model": leaves()}, meta={}).wait()


def save_plain(uri):
    """None of the forms that are Cairn's own."""
    tree = {path: leaf for path, leaf in leaves().items() if path not in OWN_FORMS}
    with Checkpointer(uri, writer_id="job") as checkpointer:
        checkpointer.save(1, {"model": tree}, meta={}).wait()
    run = Run.open(uri)
    as_plain_step(run, run.step(1), digest_files=2)


@pytest.fixture
def root_uri(some_root_uri):
    """An empty folder in one kind of store: what is read back is the same in all."""
    return some_root_uri


@pytest.fixture(params=[save_indexed, save_plain], ids=["with an index", "plain"])
def saved(request, root_uri, copies, small):
    """(reader of a step, its leaves on the host)."""
    copies.put(request.param, root_uri / "run")
    reader = reader_of(root_uri)
    tree = {path: on_host(leaf) for path, leaf in leaves().items()}
    stored = set(reader.leaves("model"))
    assert stored == set(tree) - (OWN_FORMS if request.param is save_plain else set())
    return reader, {path: tree[path] for path in stored}


def reader_of(root_uri):
    run = Run.open(root_uri / "run")
    return CheckpointReader.open(run.step_uri(run.step(1)), run.manifest(run.step(1)))


def read(reader, path, parts, *, order=None):
    """Parts of a leaf, in new memory."""
    arrays = reader.arrays("model")
    info = arrays.info(path)
    memory = aligned_empty([shape for _, shape in parts], info.dtype)
    regions = [BoxBuffer(at, one) for (at, _), one in zip(parts, memory, strict=True)]
    with LeafReads(arrays) as reads:
        pieces = reads.pieces(info, regions)
        if pieces is not None:
            if order:
                order.shuffle(pieces)
            for one in reads.start(pieces):
                one.result()
            return memory
        tasks = list(reads.tasks(info, regions))
    if order:
        order.shuffle(tasks)
    for task in tasks:
        task()
    return memory


def some_parts(shape, rng):
    """The whole, its rows in two parts, and two parts anywhere, which may overlap."""
    zero = (0,) * len(shape)
    yield [(zero, shape)]
    if shape and shape[0] > 1:
        cut = rng.randrange(1, shape[0])
        yield [(zero, (cut, *shape[1:])), ((cut, *zero[1:]), (shape[0] - cut, *shape[1:]))]
    anywhere = []
    for _ in range(2):
        origin = tuple(rng.randrange(size) for size in shape)
        sizes = zip(shape, origin, strict=True)
        anywhere.append((origin, tuple(rng.randint(1, size - at) for size, at in sizes)))
    yield anywhere


def test_any_parts_of_leaves_of_every_form_are_what_was_saved(saved):
    reader, expected = saved
    rng = random.Random(0)
    for path, array in expected.items():
        for parts in some_parts(array.shape, rng):
            found = read(reader, path, parts, order=rng)
            for one, (origin, shape) in zip(found, parts, strict=True):
                assert raw(one) == raw(array[(*inside(origin, shape), ...)]), path


def refusals(reader, expected):
    """By path, the errors of leaves that can't be read; all others are what was saved."""
    manifest = reader.manifest
    if manifest.index is None:  # nothing is known of the data files: only the reads can notice
        known = tuple(one for one in manifest.inline_objects if not is_data_file(one.name))
        manifest = manifest.model_copy(update={"inline_objects": known})
    again = CheckpointReader.open(reader.uri, manifest)
    found = {}
    for path, array in expected.items():
        try:
            (one,) = read(again, path, [((0,) * array.ndim, array.shape)])
        except CorruptionError as error:
            found[path] = str(error)
        else:
            assert raw(one) == raw(array)
    return found


def test_a_flipped_bit_of_a_value_file_is_never_a_number(saved):
    reader, expected = saved
    store = ObjectStore.open(reader.uri)
    names = store.list("model/d/")
    assert len(names) > 4
    rng = random.Random(1)
    for name in names:
        before = store.read(name).value
        content = bytearray(before)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        store.write(name, bytes(content))
        ((path, error),) = refusals(reader, expected).items()
        assert f"model: {path}" in error
        store.write(name, before)
    assert not refusals(reader, expected)


def test_value_files_of_equal_size_that_changed_places_are_noticed(root_uri, small):
    tree = {name: put(floats(32, 16, seed=seed)) for seed, name in enumerate("abcd")}
    with Checkpointer(root_uri / "run", writer_id="job") as checkpointer:
        checkpointer.save(1, {"model": tree}, meta={}).wait()
    reader = reader_of(root_uri)
    store = ObjectStore.open(reader.uri)
    stored = {name: store.read(name).value for name in store.list("model/d/")}
    (one, first), (other, second) = next(
        pair
        for pair in itertools.combinations(stored.items(), 2)
        if len(pair[0][1]) == len(pair[1][1])
    )
    store.write(one, second)
    store.write(other, first)
    found = refusals(reader, {path: np.asarray(leaf) for path, leaf in tree.items()})
    assert found
    for path, error in found.items():
        assert f"model: {path}, chunk [" in error


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99, None])
def test_a_value_file_that_is_cut_short_or_gone_is_an_error(saved, kept):
    reader, expected = saved
    store = ObjectStore.open(reader.uri)
    name = store.list("model/d/")[0]
    before = store.read(name).value
    if kept is None:
        store.delete(name)
    else:
        store.write(name, before[: int(kept * len(before))])
    found = refusals(reader, expected)
    assert found
    for path, error in found.items():
        assert f"model: {path}" in error


@pytest.mark.parametrize("zarr3", [True, False])
def test_leaves_that_plain_orbax_wrote_are_read_in_parts(tmp_path, zarr3):
    tree = {
        "rows": put(floats(64, 48), "fsdp", None),
        "plain": floats(30, 7),
        "number": jnp.int32(4),
    }
    context = ocp.Context()
    context.array.saving.use_zarr3 = zarr3
    with context:
        ocp.save_checkpointables(tmp_path / "plain", {"model": tree})
    reader = CheckpointReader.open(parse_uri(tmp_path / "plain"))
    rng = random.Random(2)
    for path, leaf in tree.items():
        array = np.asarray(leaf)
        for parts in some_parts(array.shape, rng):
            for one, (origin, shape) in zip(read(reader, path, parts), parts, strict=True):
                assert raw(one) == raw(array[(*inside(origin, shape), ...)])
