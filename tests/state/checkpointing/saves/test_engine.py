"""What Cairn writes is an Orbax checkpoint: Orbax reads it without Cairn, and finds its damage."""

import asyncio
import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as legacy
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from cairn import Checkpointer, InvalidURIError, Run, UnsupportedFormatError, parse_uri
from cairn.state.checkpointing.restore import restore_item
from cairn.storage.arrays.dtypes import dtype_named
from tests.state.seams import STORED_DTYPES, begin_step, data_file_writers, host_arrays
from tests.state.seams import chunks as chunk_shape
from tests.storage.states import abstract, assert_same, floats, mesh, put, raw, raws, state

WIDE = ("int64", "uint64", "float64", "complex128")
"""JAX has these only with x64 on."""


@pytest.fixture
def save(some_root_uri):
    """Saves items as step 1 of a new run; gives the step's folder."""

    def saved(**items):
        with Checkpointer(some_root_uri / "run", writer_id="job") as checkpointer:
            handle = checkpointer.save(1, items, meta={"step": 1})
            handle.wait()
        return handle.uri

    return saved


@pytest.fixture
def save_here(tmp_path):
    """The same on a local disk; gives a path."""

    def saved(**items):
        with Checkpointer(tmp_path / "run", writer_id="job") as checkpointer:
            handle = checkpointer.save(1, items, meta={"step": 1})
            handle.wait()
        return Path(handle.uri.local_path)

    return saved


def load(step, target, item="model"):
    return ocp.load(step, target, checkpointable_name=item)


# Plain Orbax reads it.


@pytest.mark.without_s3("plain Orbax does not read it")
def test_plain_orbax_loads_a_step_bit_for_bit(save):
    items = state()
    uri = save(**items)
    assert_same(load(uri.orbax_path(), abstract(items["model"])), items["model"])
    moments, counters, _ = items["optimizer"]
    optimizer = {"0": moments, "1": counters}  # stored as nested dicts with text keys
    assert_same(load(uri.orbax_path(), abstract(optimizer), "optimizer"), optimizer)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_plain_orbax_loads_a_step_onto_other_devices(save_here, count):
    tree = state()["model"]
    step = save_here(model=tree)
    on = mesh(count, dp=1)
    turned = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(on, PartitionSpec(*reversed(leaf.sharding.spec))),
        ),
        tree,
    )
    found = load(step, turned)
    assert raws(found) == raws(tree)
    assert all(leaf.sharding.mesh == on for leaf in jax.tree.leaves(found))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_loads_a_step_as_it_was_sharded_without_being_told(save_here):
    tree = state()["model"]
    found = ocp.load(save_here(model=tree), checkpointable_name="model")
    assert_same(found, tree)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert leaf.sharding == expected.sharding


def test_plain_orbax_loads_numpy_arrays_and_numbers(save_here):
    tree = {"w": floats(5, 7).T, "scalar": np.float64(0.1), "flag": True, "n": 3}
    arrays = {name: np.asarray(leaf) for name, leaf in tree.items()}
    found = load(save_here(model=tree), jax.tree.map(np.zeros_like, arrays))
    assert raws(found) == raws(arrays)


@pytest.mark.without_s3("plain Orbax does not read it")
def test_plain_orbax_loads_keys_with_slashes_and_dots(save):
    tree = {
        "model.layers.0.weight": put(floats(8, 4), "fsdp", None),
        "linear/~/w": put(floats(6)),
        "linear": {"~": {"w": put(floats(5, seed=1))}},
        "a%2Fb": put(floats(4, seed=2)),
    }
    path = save(model=tree).orbax_path()
    assert_same(load(path, abstract(tree)), tree)


def test_an_item_has_any_name_that_orbax_has_a_use_for_or_is_refused_at_once(save_here):
    """Orbax registers handlers for some names; an item called so must still be a tree."""
    registered = {name for _, name in ocp.handlers.global_registry().get_all_entries() if name}
    assert registered >= {"state"}
    for name in sorted({*registered, "pytree", "params", "json"} - {"metrics"}):
        step = save_here(**{name: {"a": floats(3)}})
        assert raws(ocp.load(step, checkpointable_name=name)) == raws({"a": floats(3)})
        assert raws(ocp.load_checkpointables(step)[name]) == raws({"a": floats(3)})
        assert_same(restore_item(parse_uri(step), name, {"a": floats(3)}), {"a": floats(3)})
        shutil.rmtree(step.parent.parent.parent)
    with pytest.raises(InvalidURIError, match="invalid item name"):
        save_here(metrics={"a": floats(3)})


@pytest.mark.without_s3("plain Orbax does not read it")
def test_the_legacy_checkpointers_restore_an_item(save):
    """On a bucket, which has no renames, they want a marker in each item that they are given."""
    tree = state()["model"]
    uri = save(model=tree)
    item = (uri / "model").orbax_path()
    everywhere = NamedSharding(mesh(4), PartitionSpec())
    arguments = jax.tree.map(lambda _: legacy.ArrayRestoreArgs(sharding=everywhere), tree)
    with legacy.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(item, restore_args=arguments)
    assert raws(found) == raws(tree)
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(found))
    with legacy.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(item, abstract(tree)), tree)
    with legacy.Checkpointer(legacy.JsonCheckpointHandler("data.json")) as checkpointer:
        found = checkpointer.restore((uri / "meta").orbax_path())
    assert found == {"step": 1}


def test_every_item_ends_with_its_marker_and_the_manifest_names_it(gcs):
    with Checkpointer(f"{gcs.bucket_uri}/run", writer_id="job") as checkpointer:
        handle = checkpointer.save(1, {**state(), "empty": {}}, meta={"step": 1})
        handle.wait()
    written = [
        request.name.removeprefix("run/attempts/1/1/")
        for request in gcs.server.requests
        if (request.bucket, request.operation) == (gcs.bucket, "upload")
    ]
    markers = {f"{item}/commit_success.txt" for item in ("model", "optimizer", "meta")}
    assert {name for name in written if name.endswith("/commit_success.txt")} == markers
    for marker in markers:
        item, _, _ = marker.partition("/")
        own = [name for name in written if name.startswith(f"{item}/")]
        assert own[-1] == marker
    assert written.index("commit_success.txt") > max(map(written.index, markers))
    run = Run.open(f"{gcs.bucket_uri}/run")
    assert markers < {record.name for record in run.contents(run.step(1)).objects}


def test_orbax_lists_the_steps_and_describes_the_arrays(save_here):
    tree = {"w": put(floats(64, 32), "fsdp", None), "n": jnp.int32(3)}
    step = save_here(model=tree)
    with ocp.training.Checkpointer(step.parent) as checkpointer:
        assert [found.step for found in checkpointer.checkpoints] == [1]
    described = ocp.metadata(step, checkpointable_name="model").metadata
    for name, leaf in tree.items():
        assert (tuple(described[name].shape), described[name].dtype) == (leaf.shape, leaf.dtype)
    assert described["w"].sharding_metadata.to_jax_sharding() == tree["w"].sharding


def test_plain_orbax_loads_every_dtype_that_is_stored_as_it_is(save_here):
    numbers = np.random.default_rng(0).integers(-2, 2, (8, 16)).astype(np.float32)
    leaves, targets = {}, {}
    for dtype in sorted(STORED_DTYPES - {"int4"}):
        host = numbers.astype(dtype_named(dtype))
        leaves[dtype] = {"host": host}
        if dtype not in WIDE:
            leaves[dtype]["device"] = put(host, "fsdp", None)
            leaves[dtype]["columns"] = put(host, "dp", "fsdp")
        targets[dtype] = {**leaves[dtype], "host": np.zeros_like(host)}
    found = load(save_here(model=leaves), abstract(targets))
    for dtype, tree in leaves.items():
        assert raws(found[dtype]) == raws(tree), dtype


def test_plain_orbax_loads_the_bytes_of_leaves_that_are_packed(save_here):
    """Two elements in a byte, low half first: the manifest and Orbax's custom metadata say so."""
    host = np.random.default_rng(0).integers(-8, 8, (6, 8)).astype(ml_dtypes.int4)
    step = save_here(model={"w": host})
    found = load(step, {"w": np.zeros((6, 4), np.uint8)})["w"]
    low, high = found & 15, found >> 4
    codes = np.stack([low, high], axis=-1).reshape(6, 8)
    assert raw(codes) == raw(host.astype(np.int8).view(np.uint8) & 15)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_plain_orbax_loads_typed_keys_as_keys(save_here, impl):
    keys = jax.random.split(jax.random.key(5, impl=impl), 6)
    found = load(save_here(model={"key": keys}), {"key": keys})["key"]
    assert found.dtype == keys.dtype
    assert raw(found) == raw(keys)


def test_plain_orbax_loads_many_shards_and_chunks(save_here, monkeypatch):
    for name, value in {"SHARD_BYTES": 2048, "CHUNK_BYTES": 256, "MIN_CHUNK_BYTES": 64,
                        "SQUARE_ABOVE_BYTES": 4096}.items():  # fmt: skip
        monkeypatch.setattr(chunk_shape, name, value)
    monkeypatch.setattr(data_file_writers, "FILE_BYTES", 5000)
    host_arrays._layout.cache_clear()
    tree = {"w": put(floats(64, 48), "dp", None), "v": put(floats(48, 64), None, "fsdp")}
    step = save_here(model=tree)
    host_arrays._layout.cache_clear()
    assert len(list((step / "model/d").iterdir())) > 4
    for on in (mesh(), mesh(3, dp=1)):
        target = abstract({"w": tree["w"]}, on)
        target["v"] = jax.ShapeDtypeStruct((48, 64), np.float32, sharding=NamedSharding(
            on, PartitionSpec("fsdp", None)))  # fmt: skip
        assert raws(load(step, target)) == raws(tree)


# It is laid out as Orbax's own handler lays it out.


def saved_by_orbax(folder, tree):
    context = ocp.Context()
    context.array.saving.use_compression = False
    with context:
        ocp.save_checkpointables(folder, {"model": tree})
    return folder / "model"


def without_cuts(metadata):
    """Orbax's description of a tree, but for how arrays are cut, which is ours to choose."""
    for leaf in metadata["tree_metadata"].values():
        leaf["value_metadata"].pop("write_shape", None)
    return metadata


def test_small_files_say_what_those_of_orbax_say(save_here, tmp_path):
    """A drift guard: another Orbax that describes trees otherwise fails here."""
    tree = {
        "layers": {"0": {"w": put(floats(64, 32), "fsdp", None)}, "1": {"w": put(floats(4, 4))}},
        "host": floats(3),
        "key": jax.random.key(0),
        "one": jax.device_put(floats(2), jax.devices()[2]),
    }
    ours = save_here(model=tree) / "model"
    theirs = saved_by_orbax(tmp_path / "plain", tree)
    for name in ("_METADATA", "_sharding"):
        found, expected = (json.loads((one / name).read_text()) for one in (ours, theirs))
        if name == "_METADATA":
            found, expected = without_cuts(found), without_cuts(expected)
        assert found == expected, name
    layouts = [
        json.loads((one / "array_metadatas/process_0").read_text()) for one in (ours, theirs)
    ]
    names = [
        {
            (one["array_metadata"]["param_name"], str(one["array_metadata"]["ext_metadata"]))
            for one in layout["array_metadatas"]
        }
        for layout in layouts
    ]
    assert names[0] == names[1]
    assert [*layouts[0]["array_metadatas"][0]["array_metadata"]] == [
        *layouts[1]["array_metadatas"][0]["array_metadata"]
    ]


def zarr_of(item, name):
    base = f"file://{item}/"
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    return ts.open(spec, read=True).result().spec().to_json()["metadata"]


def test_arrays_differ_from_those_of_orbax_by_the_checksum_and_the_cut_alone(save_here, tmp_path):
    tree = {"w": put(floats(64, 32), "fsdp", None), "b": put(jnp.ones(16, jnp.bfloat16), "fsdp")}
    ours = save_here(model=tree) / "model"
    theirs = saved_by_orbax(tmp_path / "plain", tree)
    for name in tree:
        found, expected = zarr_of(ours, name), zarr_of(theirs, name)
        (sharding,), (plain,) = found.pop("codecs"), expected.pop("codecs")
        inner = sharding["configuration"].pop("codecs")
        assert inner == [*plain["configuration"].pop("codecs"), {"name": "crc32c"}]
        sharding["configuration"].pop("chunk_shape")
        plain["configuration"].pop("chunk_shape")
        assert sharding == plain
        found.pop("chunk_grid")
        expected.pop("chunk_grid")
        assert found == expected


def test_saved_arrays_name_the_checksum_in_their_own_spec(save_here):
    step = save_here(model={"w": floats(8, 8), "key": jax.random.key(0)})
    for name in ("w", "key"):
        (sharding,) = zarr_of(step / "model", name)["codecs"]
        assert [codec["name"] for codec in sharding["configuration"]["codecs"]] == [
            "bytes",
            "crc32c",
        ]


def test_a_step_records_the_handler_of_orbax(save_here):
    step = save_here(model={"w": floats(2)})
    recorded = json.loads((step / "_CHECKPOINT_METADATA").read_text())["item_handlers"]["model"]
    handler = ocp.handlers.PyTreeHandler
    assert recorded == f"{handler.__module__}.{handler.__qualname__}"


def test_a_step_records_how_orbax_reads_its_json(save_here):
    step = save_here(model={"w": floats(2)})
    assert ocp.load_checkpointables(step, {"meta": None})["meta"] == {"step": 1}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_loads_all_items_without_being_told_of_any(save_here):
    items = {"model": {"w": put(floats(8, 8), "fsdp", None)}, "optimizer": {"m": floats(3)}}
    found = ocp.load_checkpointables(save_here(**items))
    assert found["meta"] == {"step": 1}
    assert raws(found["model"]) == raws(items["model"])
    assert raws(found["optimizer"]) == raws(items["optimizer"])


def test_what_orbax_is_given_only_saves(tmp_path):
    write = begin_step(parse_uri(tmp_path / "1"), {}, {}, {}, "key")
    with pytest.raises(UnsupportedFormatError, match="this only saves"):
        asyncio.run(write.load(parse_uri(tmp_path)))


def test_saves_of_plain_orbax_in_the_same_process_are_left_as_they_are(save_here, tmp_path):
    tree = {"w": put(floats(8, 8), "fsdp", None)}
    save_here(model=tree)
    theirs = saved_by_orbax(tmp_path / "plain", tree)
    (sharding,) = zarr_of(theirs, "w")["codecs"]
    assert "crc32c" not in [codec["name"] for codec in sharding["configuration"]["codecs"]]
    assert_same(load(theirs.parent, abstract(tree)), tree)


# Damage is an error for plain Orbax too: the codec is in the stored spec.


def test_no_flipped_bit_loads_as_another_number_on_a_plain_orbax_load(save_here):
    """Plain Orbax, no help from Cairn. Every byte of these files counts: every flip raises."""
    leaves = {"w": put(floats(256, 64), "fsdp", None), "b": floats(100), "s": np.asarray(1.5)}
    step = save_here(model=leaves)
    expected = raws(leaves)
    assert raws(load(step, abstract(leaves))) == expected
    files = [*step.glob("model/d/*"), *step.glob("model/b/*"), step / "model/manifest.ocdbt"]
    assert len(files) >= 3
    rng = random.Random(0)
    for file in files:
        whole = file.read_bytes()
        for _ in range(15):
            damaged = bytearray(whole)
            damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(Exception, match=r"(DATA_LOSS|INVALID_ARGUMENT|[Ee]rror)"):
                load(step, abstract(leaves))
        file.write_bytes(whole)
    assert raws(load(step, abstract(leaves))) == expected


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_inside_an_array_is_named_by_orbax(save_here, bit):
    leaves = {"w": put(floats(256, 64), "fsdp", None)}
    step = save_here(model=leaves)
    shard = np.asarray(leaves["w"].addressable_shards[0].data).tobytes()
    (file,) = (file for file in step.rglob("d/*") if shard in file.read_bytes())
    damaged = bytearray(file.read_bytes())
    damaged[damaged.find(shard) + len(shard) // 2] ^= 1 << bit
    file.write_bytes(damaged)
    with pytest.raises(Exception, match="reading array index") as caught:
        load(step, abstract(leaves))
    assert "Digest mismatch" in str(caught.value.__cause__)


# Items.


def test_an_item_without_arrays_is_an_item(save):
    uri = save(model={"w": floats(2)}, empty={}, hollow={"none": None, "z": np.zeros((0, 3))})
    assert restore_item(uri, "empty", {}) == {}
    found = restore_item(uri, "hollow", {"none": None, "z": np.ones((0, 3))})
    assert found["z"].shape == (0, 3)
