import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from cairn import (
    Checkpointer,
    CheckpointReader,
    CorruptionError,
    InvalidSliceError,
    LeafNotFoundError,
    NotACheckpointError,
    Run,
    StepNotFoundError,
    StoreUnavailableError,
    UnsupportedFormatError,
    adopt,
    parse_uri,
)
from cairn.storage.arrays.boxes import MAX_CHUNK_ROW_BYTES
from cairn.storage.arrays.ocdbt import DATA_FOLDER
from cairn.storage.runs.records.manifest import LeafRecord
from tests.storage.plain_steps import as_plain_step

STEP = 3
META = {"step": 3, "nested": {"list": [1, 2.5, "text", None, True]}, "empty": {}}


def mesh():
    return jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def sharded(array, *axes):
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.device_put(array, jax.sharding.NamedSharding(mesh(), spec))


def plain_tree():
    """Leaves that plain Orbax takes as they are, by path."""
    numbers = np.random.default_rng(0)
    small = numbers.integers(0, 8, (8, 12)).astype(np.float32)
    leaves = {
        "matrix": sharded(numbers.standard_normal((64, 48), dtype=np.float32), "fsdp", "dp"),
        "columns": sharded(numbers.standard_normal((6, 32), dtype=np.float32), None, "fsdp"),
        "stacked": sharded(numbers.standard_normal((4, 8, 6), dtype=np.float32), None, "dp"),
        "replicated": sharded(np.arange(10, dtype=np.int32)),
        "scalar": jnp.float32(2.5),
        "bool": jnp.asarray(small % 2 == 0),
        "complex64": jnp.asarray(small + 1j, jnp.complex64),
        "legacy_key": jax.random.PRNGKey(7),
        "float64": np.arange(3.0),
        "deep/er/leaf": jnp.ones((1,)),
    }
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "uint32", "int8"):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        leaves[name] = sharded(small.astype(dtype), "dp")
    return leaves


def nested(leaves):
    tree: dict = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def save_plain(uri, tree, **saving):
    """An Orbax checkpoint that Cairn had no part in."""
    context = ocp.Context()
    for name, value in saving.items():
        setattr(context.array.saving, name, value)
    registry = ocp.handlers.local_registry(include_global_registry=True)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
    context.checkpointables.registry = registry
    with context, ocp.training.Checkpointer(uri.orbax_path()) as checkpointer:
        checkpointer.save_checkpointables(STEP, {"model": tree, "meta": META})
    return uri / str(STEP)


def save_cairn(uri, tree):
    """(step folder, manifest) of a step that Cairn saved."""
    with Checkpointer(uri) as checkpointer:
        checkpointer.save(STEP, {"model": tree, "optimizer": {}}, meta=META).wait()
    run = Run.open(uri)
    step = run.step(STEP)
    return run.step_uri(step), run.manifest(step)


def save_adopted(uri, tree):
    """(step folder, manifest) of a step as a copy of an adopted one."""
    step_uri, _ = save_cairn(uri, tree)
    run = Run.open(uri)
    return step_uri, as_plain_step(run, run.step(STEP))


FORMS = {
    "orbax defaults": {},
    "uncompressed": {"use_compression": False, "ocdbt_target_data_file_size": 64 << 20},
    "zarr2": {"use_zarr3": False},
    "no ocdbt": {"use_ocdbt": False},
    "zarr2 no ocdbt": {"use_zarr3": False, "use_ocdbt": False},
}


@pytest.fixture(scope="module", params=[*FORMS, "cairn", "cairn with manifest"])
def stored(request, tmp_path_factory):
    """(reader, the arrays that were saved) of every kind of checkpoint."""
    leaves = plain_tree()
    uri = parse_uri(tmp_path_factory.mktemp("stored")) / "run"
    if request.param in FORMS:
        if "zarr2" in request.param:  # which has no such dtypes
            leaves = {p: v for p, v in leaves.items() if p not in ("int4", "float8_e4m3fn")}
        reader = CheckpointReader.open(save_plain(uri, nested(leaves), **FORMS[request.param]))
    else:
        step_uri, manifest = save_cairn(uri, nested(leaves))
        reader = CheckpointReader.open(step_uri, None if request.param == "cairn" else manifest)
    return reader, {path: np.asarray(leaf) for path, leaf in leaves.items()}


def assert_same(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


def test_every_leaf_is_listed_and_read_bit_equal(stored):
    reader, arrays = stored
    infos = reader.leaves("model")
    assert list(infos) == sorted(arrays)
    for path, array in arrays.items():
        assert (infos[path].shape, infos[path].dtype) == (array.shape, array.dtype)
        assert infos[path].nbytes == array.nbytes
        assert infos[path] == reader.leaf("model", path)
        assert_same(reader.read("model", path), array)


@pytest.mark.parametrize(
    ("shape", "chunk"), [((2**40,), (1,)), ((2**45,), (2**20,)), ((2,) * 32, (1,) * 32)]
)
def test_leaf_of_more_chunks_than_memory_is_worth_is_refused(tmp_path, shape, chunk):
    saving = FORMS["zarr2 no ocdbt"]
    step = save_plain(parse_uri(tmp_path) / "run", {"w": np.ones(4, np.int8)}, **saving)
    (described,) = Path(step.local_path).rglob(".zarray")
    body = json.loads(described.read_text())
    described.write_text(json.dumps(body | {"shape": shape, "chunks": chunk}))
    reader = CheckpointReader.open(step)
    index = (0,) * len(shape)
    for ask in (
        lambda: reader.read("model", "w", index=index),
        lambda: next(reader.iter_blocks("model", "w", max_bytes=1 << 20)),
        lambda: next(reader.iter_pieces("model", "w")),
    ):
        with pytest.raises(CorruptionError, match="too many chunks in a leaf"):
            ask()


@pytest.mark.parametrize("shape", [(2**60,), (4,)])
def test_leaf_of_a_chunk_that_does_not_fit_into_memory_is_refused(tmp_path, shape):
    """It is decoded whole whatever is wanted; TensorStore ends the process where it has no room."""
    saving = FORMS["zarr2 no ocdbt"]
    step = save_plain(parse_uri(tmp_path) / "run", {"w": np.ones(4, np.int8)}, **saving)
    (described,) = Path(step.local_path).rglob(".zarray")
    body = json.loads(described.read_text())
    described.write_text(json.dumps(body | {"shape": shape, "chunks": [2**60]}))
    with pytest.raises(UnsupportedFormatError, match=r"at most .* a quarter of the memory here"):
        CheckpointReader.open(step).read("model", "w", index=(0,))
    (problem,) = adopt(tmp_path / "run", tmp_path / "adopted").problems
    assert "a quarter of the memory here" in problem


def test_meta_comes_back_as_it_was_saved(stored):
    reader, _ = stored
    assert reader.meta() == META
    assert "meta" not in reader.items()
    assert "model" in reader.items()


INDICES = (
    [(), 3, -1, slice(5, 40), slice(1, 60, 7), (slice(None), 5), (..., slice(-3, None)),
     (slice(10, 10),), (-64, -48), (slice(17, 33), slice(20, 30)), slice(900, 1000),
     (np.int64(-3), np.uint8(5))]
)  # fmt: skip


def test_slices_are_those_of_numpy(stored):
    reader, arrays = stored
    for index in INDICES:
        assert_same(reader.read("model", "matrix", index), np.asarray(arrays["matrix"][index]))


def test_what_is_no_part_of_the_leaf_is_refused_by_name(stored):
    reader, _ = stored
    for index in (64, (0, 48), (0, 0, 0), slice(None, None, -1), "x", 1.5):
        with pytest.raises(InvalidSliceError, match=r"model: matrix.*\(64, 48\)"):
            reader.read("model", "matrix", index)


@pytest.mark.parametrize(
    ("max_bytes", "transpose"),
    [(1, False), (100, True), (1000, False), (5000, True), (1 << 20, False)],
)
def test_blocks_are_the_leaf_in_order_and_small_enough(stored, max_bytes, transpose):
    reader, arrays = stored
    for path, array in arrays.items():
        if max_bytes == 1 and array.size > 100:
            continue  # a block of each element, of small leaves
        expected = array.transpose() if transpose else array
        blocks = list(reader.iter_blocks("model", path, max_bytes=max_bytes, transpose=transpose))
        assert all(block.flags.c_contiguous and block.ndim == array.ndim for block in blocks)
        assert all(block.nbytes <= max(max_bytes, array.itemsize) for block in blocks)
        joined = np.concatenate([block.reshape(-1) for block in blocks]).reshape(expected.shape)
        assert_same(joined, expected)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    axes=st.permutations(range(3)),
    axis=st.integers(0, 2),
    start=st.integers(0, 7),
    size=st.integers(0, 8),
    max_bytes=st.integers(1, 900),
)
def test_blocks_of_a_part_in_any_order_of_axes(stored, axes, axis, start, size, max_bytes):
    reader, arrays = stored
    index = (slice(1, 4), slice(start, start + size), slice(None))
    expected = arrays["stacked"][index].transpose(axes)
    blocks = list(
        reader.iter_blocks(
            "model", "stacked", max_bytes=max_bytes, transpose=axes, axis=axis, index=index
        )
    )
    assert all(block.nbytes <= max(max_bytes, 4) for block in blocks)
    slabs = all(
        block.shape[:axis] + block.shape[axis + 1 :]
        == expected.shape[:axis] + expected.shape[axis + 1 :]
        for block in blocks
    )
    if axis == 0:
        joined = np.concatenate([np.empty(0, np.float32), *(b.reshape(-1) for b in blocks)])
        assert joined.tobytes() == expected.tobytes()
    elif slabs and blocks:
        assert_same(np.concatenate(blocks, axis=axis), np.ascontiguousarray(expected))


def test_integers_of_a_block_index_keep_their_axis(stored):
    reader, arrays = stored
    (block,) = reader.iter_blocks(
        "model", "stacked", max_bytes=1 << 20, index=2, transpose=(0, 2, 1)
    )
    assert_same(block, np.ascontiguousarray(arrays["stacked"][2:3].transpose(0, 2, 1)))


def test_blocks_that_do_not_exist_are_refused(stored):
    reader, _ = stored
    wrong = [{"axis": 2}, {"transpose": (0, 0)}, {"index": slice(0, 9, 2)}, {"index": 99}]
    for arguments in wrong:
        with pytest.raises(InvalidSliceError, match="model: matrix"):
            reader.iter_blocks("model", "matrix", max_bytes=100, **arguments)


def test_unknown_leaf_and_item_are_not_found_and_name_what_is_near(stored):
    reader, _ = stored
    with pytest.raises(LeafNotFoundError, match="Did you mean matrix"):
        reader.read("model", "matrx")
    with pytest.raises(LeafNotFoundError, match="'modle'"):
        reader.leaves("modle")


def test_forms_of_cairn_come_back_as_they_were(tmp_path):
    leaves = {
        "empty": np.zeros((0, 3), ml_dtypes.bfloat16),
        "uint4": jnp.arange(12, dtype=jnp.uint4).reshape(3, 4),
        "float8_e4m3": np.arange(12).astype(ml_dtypes.float8_e4m3).reshape(3, 4),
        "number": 3,
        "truth": True,
    }
    key = jax.random.key(5)
    step_uri, manifest = save_cairn(
        parse_uri(tmp_path / "run"), {**leaves, "key": key, "keys": jax.random.split(key, 4)}
    )
    for given_manifest in (None, manifest):
        reader = CheckpointReader.open(step_uri, given_manifest)
        assert reader.items() == ["model", "optimizer"]
        assert reader.leaves("optimizer") == {}
        infos = reader.leaves("model")
        for path, leaf in leaves.items():
            found = reader.read("model", path)
            assert_same(found, np.asarray(leaf))
            assert (infos[path].shape, infos[path].dtype) == (found.shape, found.dtype)
            blocks = list(reader.iter_blocks("model", path, max_bytes=5))
            assert all(block.dtype == found.dtype for block in blocks)
            assert sum(block.size for block in blocks) == found.size
        words = np.asarray(jax.random.key_data(jax.random.split(key, 4)))
        assert_same(reader.read("model", "keys"), words)
        assert infos["keys"].shape == (4, 2)
        assert_same(reader.read("model", "key"), np.asarray(jax.random.key_data(key)))
        assert reader.read("model", "empty", slice(0, 0)).shape == (0, 3)


def test_meta_that_plain_orbax_stored_as_a_tree_reads_as_json(tmp_path):
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_checkpointables(STEP, {"model": {"a": jnp.ones(2)}, "meta": META})
    assert CheckpointReader.open(parse_uri(tmp_path / "run" / str(STEP))).meta() == META


@pytest.mark.parametrize("root_uri", ["file", "gcs"], indirect=True)
def test_reads_from_every_store(root_uri):
    array = np.random.default_rng(0).standard_normal((64, 48), dtype=np.float32)
    tree = {"w": sharded(array, "fsdp", "dp"), "b": sharded(array[0])}
    plain = CheckpointReader.open(save_plain(root_uri / "plain", tree))
    ours = CheckpointReader.open(*save_cairn(root_uri / "ours", tree))
    for reader in (plain, ours):
        assert reader.meta() == META
        assert_same(reader.read("model", "w", slice(3, 9)), array[3:9])
        blocks = reader.iter_blocks("model", "w", max_bytes=1000, transpose=True)
        assert_same(np.concatenate(list(blocks)), np.ascontiguousarray(array.T))


@pytest.mark.parametrize("root_uri", ["file", "gcs"], indirect=True)
def test_folder_that_is_no_committed_step_is_refused(root_uri):
    step_uri = save_plain(root_uri / "run", {"w": jnp.ones(3)})
    with pytest.raises(StepNotFoundError, match=r"run/9\b"):
        CheckpointReader.open(root_uri / "run" / "9")
    for folder in (root_uri / "run", step_uri / "model" / "d"):
        with pytest.raises(NotACheckpointError, match=r"commit_success\.txt"):
            CheckpointReader.open(folder)


def test_uncommitted_step_on_an_object_store_is_refused(gcs):
    from cairn.storage.store.objects import ObjectStore

    uri = parse_uri(gcs.bucket_uri) / "run" / "3"
    ObjectStore.open(uri).write("_CHECKPOINT_METADATA", b'{"item_handlers": {"model": ""}}')
    with pytest.raises(NotACheckpointError, match=r"commit_success\.txt"):
        CheckpointReader.open(uri)


def data_files(step_uri, item="model"):
    folder = Path((step_uri / item).local_path)
    return [p for p in folder.rglob("*") if p.is_file() and p.parent.name in ("d", DATA_FOLDER)]


def flip_bit_of(files, data, bit):
    """Flip one bit of `data` where it lies in one of `files`; True if it was found."""
    for file in files:
        content = bytearray(file.read_bytes())
        at = content.find(data)
        if at >= 0:
            content[at + bit // 8] ^= 1 << (bit % 8)
            file.write_bytes(content)
            return True
    return False


@pytest.mark.parametrize("bit", [0, 7, 1001, 8 * 16384 - 1])
def test_flipped_bit_is_an_error_that_names_the_leaf(tmp_path, bit):
    array = np.random.default_rng(0).standard_normal(4096, dtype=np.float32)
    other = np.random.default_rng(1).standard_normal(4096, dtype=np.float32)
    tree = {"layer": {"w": jnp.asarray(array), "other": jnp.asarray(other)}}
    step_uri, manifest = save_cairn(parse_uri(tmp_path / "run"), tree)
    assert flip_bit_of(data_files(step_uri), array.tobytes(), bit)
    reader = CheckpointReader.open(step_uri, manifest)
    with pytest.raises(CorruptionError, match=r"model: layer/w\b") as caught:
        reader.read("model", "layer/w")
    assert caught.value.next_step
    with pytest.raises(CorruptionError, match=r"layer/w\b"):
        list(reader.iter_blocks("model", "layer/w", max_bytes=1000))
    assert_same(reader.read("model", "layer/other"), other)


@pytest.mark.parametrize("saver", ["plain", "cairn"])
def test_removed_data_file_is_an_error_not_zeros(tmp_path, saver):
    array = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32))
    uri = parse_uri(tmp_path / "run")
    step_uri = (
        save_plain(uri, {"w": array}) if saver == "plain" else save_cairn(uri, {"w": array})[0]
    )
    for file in data_files(step_uri):
        values = file.parent.name == DATA_FOLDER or "ocdbt.process_" in str(file)
        if values and file.stat().st_size > 0:
            file.unlink()
    with pytest.raises(CorruptionError, match="model: w"):
        CheckpointReader.open(step_uri).read("model", "w")


def test_truncated_data_file_is_an_error(tmp_path):
    array = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    step_uri, _ = save_cairn(parse_uri(tmp_path / "run"), {"w": jnp.asarray(array)})
    largest = max(data_files(step_uri), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptionError, match="model: w"):
        CheckpointReader.open(step_uri).read("model", "w")


def test_metadata_that_is_no_json_is_corrupt_and_names_the_file(tmp_path):
    step_uri, _ = save_cairn(parse_uri(tmp_path / "run"), {"w": jnp.ones(3)})
    Path((step_uri / "model/_METADATA").local_path).write_bytes(b'{"tree_metadata"')
    with pytest.raises(CorruptionError, match="model/_METADATA"):
        CheckpointReader.open(step_uri).leaves("model")


def test_file_that_is_not_as_the_manifest_records_is_corrupt(tmp_path):
    step_uri, manifest = save_cairn(parse_uri(tmp_path / "run"), {"w": jnp.ones(3)})
    path = Path((step_uri / "meta/data.json").local_path)
    path.write_text(json.dumps({**META, "step": 30}))
    with pytest.raises(CorruptionError, match=r"meta/data\.json"):
        CheckpointReader.open(step_uri, manifest).meta()


@pytest.mark.parametrize("change", [{"shape": (4,)}, {"dtype": "int32"}])
def test_leaf_that_is_not_the_manifests_is_corrupt(tmp_path, change):
    step_uri, manifest = save_adopted(parse_uri(tmp_path / "run"), {"w": jnp.ones(3)})
    (record,) = manifest.inline_leaves
    other = manifest.model_copy(
        update={"inline_leaves": (LeafRecord(**{**record.model_dump(), **change}),)}
    )
    with pytest.raises(CorruptionError, match="as in the manifest, found float32"):
        CheckpointReader.open(step_uri, other).read("model", "w")


def test_leaf_that_the_store_lost_is_corrupt(tmp_path):
    step_uri, manifest = save_adopted(parse_uri(tmp_path / "run"), {"w": jnp.ones(3)})
    (record,) = manifest.inline_leaves
    lost = LeafRecord(**{**record.model_dump(), "path": "lost"})
    other = manifest.model_copy(update={"inline_leaves": (record, lost)})
    with pytest.raises(CorruptionError, match="model: lost"):
        CheckpointReader.open(step_uri, other).read("model", "lost")


READ_WITHOUT_JAX = """
    import sys
    from cairn.storage.reading.reader import CheckpointReader
    from cairn.storage.safetensors.writer import write_shard
    from cairn.storage.store.uri import parse_uri
    reader = CheckpointReader.open(parse_uri(sys.argv[1]))
    for path in reader.leaves("model"):
        reader.read("model", path)
        list(reader.iter_blocks("model", path, max_bytes=100, transpose=True))
    loaded = {"jax", "jaxlib", "flax", "orbax", "torch", "transformers"} & set(sys.modules)
    assert not loaded, loaded
"""


def run_python(code, *arguments):
    repository = Path(__file__).resolve().parents[3]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=repository, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_reading_loads_no_array_framework(tmp_path):
    tree = {"matrix": np.ones((64, 48), np.float32)}
    ours, _ = save_cairn(parse_uri(tmp_path / "run"), tree)
    for step_uri in (ours, save_plain(parse_uri(tmp_path / "plain"), tree)):
        done = run_python(READ_WITHOUT_JAX, step_uri)
        assert done.returncode == 0, done.stderr


PEAK_OF_READING = """
    import re, sys
    from cairn.storage.reading.reader import CheckpointReader
    from cairn.storage.store.uri import parse_uri

    def peak():
        with open("/proc/self/status") as status:
            return int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1]) * 1024

    reader = CheckpointReader.open(parse_uri(sys.argv[1]))
    before = peak()
    if sys.argv[3] == "pieces":
        made = [reader.iter_pieces("model", "w")]
    else:
        made = [
            reader.iter_blocks("model", "w", max_bytes=8 << 20, transpose=transpose)
            for transpose in (False, True)
        ]
    for arrays in made:
        assert sum(array.nbytes for array in arrays) == int(sys.argv[2])
    print(peak() - before)
"""


def test_memory_of_streaming_does_not_follow_the_leaf(tmp_path):
    array = np.zeros((12288, 8192), np.float32)
    step_uri, _ = save_cairn(parse_uri(tmp_path / "run"), {"w": array})
    # Two rows of chunks (blocks alone), the pieces read ahead, and what decoding threads keep:
    # that depends on how they were scheduled, from 115 to 183 MiB of pieces on two busy cores.
    for kind, most in (("blocks", 5 * MAX_CHUNK_ROW_BYTES), ("pieces", 4 * MAX_CHUNK_ROW_BYTES)):
        done = run_python(PEAK_OF_READING, step_uri, array.nbytes, kind)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < most < array.nbytes


def test_store_that_refuses_is_unavailable_not_corrupt(gcs):
    step_uri, manifest = save_cairn(parse_uri(gcs.bucket_uri) / "run", {"w": jnp.ones(3)})
    reader = CheckpointReader.open(step_uri, manifest)
    gcs.faults.add("status", status=403, count=None)
    with pytest.raises(StoreUnavailableError):
        reader.read("model", "w")
