import enum
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from cairn import (
    Checkpointer,
    CheckpointReader,
    CorruptionError,
    LeafNotFoundError,
    NotACheckpointError,
    NotFoundError,
    Run,
    StepNotFoundError,
    TreeMismatchError,
    UnsupportedLeafError,
    parse_uri,
    verify_step,
)
from cairn.state.checkpointing.restore import read_meta, restore_item, restore_leaves, stored_tree
from cairn.storage.arrays.dtypes import dtype_named
from tests.state.seams import BITCAST, STORED_DTYPES, WIDENED, store_form, stored_items
from tests.storage.plain_steps import as_plain_step
from tests.storage.states import abstract, assert_same, floats, mesh, put, raw, raws, state

DTYPES = sorted(STORED_DTYPES | WIDENED | BITCAST)
WIDE = {"int64", "uint64", "float64", "complex128"}  # JAX has these only with x64 on


@pytest.fixture
def step(tmp_path):
    """Saves items as step 1 of a new run and gives the step's folder."""

    def saved(uri=None, **items):
        with Checkpointer(uri or tmp_path / "run", writer_id="job") as made:
            handle = made.save(1, items, meta={"step": 1, "name": "ü"})
            handle.wait()
        return handle.uri

    return saved


def make_plain(uri):
    """Make the step a copy of an adopted one, without an index."""
    run = Run.open(uri.parent.parent.parent)
    as_plain_step(run, run.step(1))


def test_a_state_comes_back_bit_equal_in_its_own_containers(step, some_root_uri):
    params = state()["model"]
    optimizer = optax.adamw(1e-3).init(params)
    uri = step(some_root_uri / "run", model=params, optimizer=optimizer)
    assert_same(restore_item(uri, "model", abstract(params)), params)
    assert_same(restore_item(uri, "optimizer", abstract(optimizer)), optimizer)
    assert read_meta(uri) == {"step": 1, "name": "ü"}
    assert stored_items(uri) == ["meta", "model", "optimizer"]


@pytest.mark.parametrize("count", [8, 4, 1])
def test_a_state_saved_on_8_devices_restores_onto_fewer_and_back(step, tmp_path, count):
    expected = state()["model"]
    uri = step(model=expected)
    smaller = restore_item(uri, "model", abstract(expected, on=mesh(count)))
    assert raws(smaller) == raws(expected)
    for leaf in jax.tree.leaves(smaller):
        assert leaf.sharding.mesh == mesh(count)
    again = step(tmp_path / "again", model=smaller)
    assert_same(restore_item(again, "model", abstract(expected)), expected)


def test_another_partitioning_restores_the_same_bits(step):
    expected = {"w": put(floats(64, 32), "fsdp", None)}
    uri = step(model=expected)
    other = {"w": put(floats(64, 32, seed=1), None, ("dp", "fsdp"))}
    found = restore_item(uri, "model", abstract(other))
    assert found["w"].sharding.spec == PartitionSpec(None, ("dp", "fsdp"))
    assert raws(found) == raws(expected)


def pattern(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Every bit pattern that the dtype has, as far as the shape has room; NaNs included."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if name in ("bool", "int2", "int4", "uint2", "uint4", "float4_e2m1fn"):
        count = {"bool": 2, "int2": 4, "uint2": 4}.get(name, 16)
        if name == "float4_e2m1fn":
            codes = (np.arange(np.prod(shape)) % count).astype(np.uint8)
            return codes.view(dtype).reshape(shape)
        low = -count // 2 if name.startswith("int") else 0
        return (np.arange(np.prod(shape)) % count + low).astype(dtype).reshape(shape)
    size = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def test_every_dtype_comes_back_bit_equal(step):
    trees = {}
    for name in DTYPES:
        host = pattern(name, (16, 24))
        trees[name] = {"host": host, "point": host[0, 0].reshape(())}
        if name not in WIDE:
            trees[name]["device"] = put(host, "fsdp", None)
    uri = step(model=trees)
    restored, stored = restore_item(uri, "model", abstract(trees)), stored_tree(uri, "model")
    for name, tree in trees.items():
        assert_same(restored[name], tree)
        assert str(stored[f"{name}/host"].dtype) == name


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def test_wide_dtypes_come_back_on_devices_with_x64_on(step, x64):
    tree = {name: put(pattern(name, (16, 24)), "fsdp") for name in sorted(WIDE)}
    assert_same(restore_item(step(model=tree), "model", abstract(tree)), tree)


def test_a_wide_dtype_is_never_narrowed_in_silence_with_x64_off(step):
    tree = {"n": np.arange(8, dtype=np.int64) + 2**40}
    uri = step(model=tree)
    wide = jax.ShapeDtypeStruct((8,), np.int64, sharding=SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(TreeMismatchError, match=r"n: expected dtype int64.*jax_enable_x64"):
        restore_item(uri, "model", {"n": wide})
    assert_same(restore_item(uri, "model", tree), tree)


def test_numbers_and_numpy_scalars_come_back_as_what_the_target_is(step):
    tree = {
        "i": -(2**63),
        "f": 0.1,
        "t": True,
        "c": 1 + 2j,
        "np": np.float32(2.5),
        "bf": ml_dtypes.bfloat16(3),
        "nothing": None,
        "empty": {},
    }
    found = restore_item(step(model=tree), "model", tree)
    assert found == tree
    assert {name: type(leaf) for name, leaf in found.items()} == {
        name: type(leaf) for name, leaf in tree.items()
    }


@pytest.mark.parametrize("axis_types", [AxisType.Auto, AxisType.Explicit])
def test_what_gives_way_to_other_dtypes_still_does_after_a_restore(step, axis_types):
    """Else a learning rate made of a Python number turns bfloat16 parameters into float32."""
    devices = jax.make_mesh((8,), ("dp",), axis_types=(axis_types,))
    tree = {
        "rate": jnp.asarray(0.1),
        "count": jnp.asarray(3),
        "odd": jnp.asarray(float("nan")) * -1,
        "flat": jax.device_put(jnp.full((8, 2), 0.5), NamedSharding(devices, PartitionSpec("dp"))),
        "none": jnp.full((0, 2), 0.5),
        "fixed": jnp.float32(0.1),
    }
    uri = step(model=tree)
    for target in (tree, abstract(tree)):
        found = restore_item(uri, "model", target)
        assert_same(found, tree)
        weak = {name for name, leaf in found.items() if leaf.weak_type}
        assert weak == {"rate", "count", "odd", "flat", "none"}
        assert found["flat"].sharding == tree["flat"].sharding
        assert not any(found[name].committed for name in ("rate", "none")) or target is not tree
    with jax.numpy_dtype_promotion("standard"):
        assert (found["rate"] * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_target_on_a_mesh_without_devices_is_told_from_one_that_does_not_fit(step):
    explicit = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Explicit,))
    place = NamedSharding(explicit, PartitionSpec("dp"))
    tree = {"w": jax.device_put(floats(8, 2), place)}
    uri = step(model=tree)
    described = jax.eval_shape(lambda: tree)
    with pytest.raises(TreeMismatchError, match="w: expected a sharding on devices, found one on"):
        restore_item(uri, "model", described)
    on_devices = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), described
    )
    assert_same(restore_item(uri, "model", on_devices), tree)


def test_arrays_without_elements_come_back(step):
    tree = {
        "host": np.zeros((0, 3), np.int16),
        "device": put(np.zeros((8, 0), ml_dtypes.bfloat16), "fsdp"),
        "full": floats(2),
    }
    uri = step(model=tree, optimizer={"only": np.zeros(0)})
    assert_same(restore_item(uri, "model", abstract(tree)), tree)
    assert_same(restore_item(uri, "optimizer", {"only": np.zeros(0)}), {"only": np.zeros(0)})


def test_random_keys_come_back_typed(step):
    tree = {
        "key": jax.random.key(7),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(1, impl="rbg"), 8),
            NamedSharding(mesh(), PartitionSpec("fsdp")),
        ),
        "legacy": jax.random.PRNGKey(3),
    }
    found = restore_item(step(model=tree), "model", abstract(tree))
    assert_same(found, tree)
    assert found["keys"].dtype == tree["keys"].dtype
    assert found["keys"].sharding.spec == PartitionSpec("fsdp")
    np.testing.assert_array_equal(
        jax.random.normal(found["key"], 4), jax.random.normal(tree["key"], 4)
    )


def test_foreign_byte_order_and_strides_are_kept_by_value(step):
    whole = floats(8, 8)
    tree = {"big": whole.astype(">f4"), "turned": whole.T, "every other": whole[::2]}
    found = restore_item(step(model=tree), "model", {**tree, "big": whole})
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf, tree[name])


@pytest.mark.parametrize("name", [">f4", "<f4", ">i2", ">c8", ">f8"])
def test_an_array_of_any_byte_order_restores_into_its_own_kind_as_native_numbers(step, name):
    tree = {"a": np.arange(6).reshape(2, 3).astype(name), "b": np.asarray(3, name)}
    found = restore_item(step(model=tree), "model", tree)
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, tree[path])
        assert leaf.dtype.isnative


def test_an_array_of_jax_can_be_asked_for_in_a_foreign_byte_order(step):
    described = jax.ShapeDtypeStruct((2, 3), np.dtype(">f4"))
    found = restore_item(step(model={"a": floats(2, 3)}), "model", {"a": described})
    assert raw(found["a"]) == raw(floats(2, 3))


FLAT = {
    "model.layers.0.weight": floats(4, 6),  # as Hugging Face names parameters
    "linear/~/w": floats(8),  # as Haiku does
    "linear": {"~": {"w": floats(3, seed=1), "w/b": floats(2, seed=5)}, "~/w": floats(2, seed=2)},
    "a%2Fb": floats(5, seed=3),
    "100%": floats(1, seed=4),
    "none/of.it": np.zeros((0, 2), np.float32),
}


def test_keys_with_slashes_and_dots_come_back(step, some_root_uri):
    tree = {**FLAT, "key/1": jax.random.key(3), "w/by.rows": put(floats(16, 4), "fsdp", None)}
    uri = step(some_root_uri / "run", model=tree)
    assert_same(restore_item(uri, "model", abstract(tree)), tree)
    assert stored_tree(uri, "model").keys() == raws(tree).keys()
    run = Run.open(uri.parent.parent.parent)
    assert verify_step(run, 1).problems == ()
    reader = CheckpointReader.open(uri, run.manifest(run.step(1)))
    assert raw(reader.read("model", "linear%2F~%2Fw")) == raw(FLAT["linear/~/w"])
    assert raw(reader.read("model", "linear/~/w")) == raw(FLAT["linear"]["~"]["w"])


def test_a_tree_is_never_restored_as_another_whose_keys_read_alike(step):
    uri = step(model={"a/b": floats(3)})
    with pytest.raises(TreeMismatchError) as caught:
        restore_item(uri, "model", {"a": {"b": floats(3)}})
    assert caught.value.problems == (
        "a/b: expected by the target, not stored",
        "a%2Fb: stored, not in the target",
    )


def test_numbered_leaves_come_back_by_number_whatever_holds_them(step):
    many = [np.int32(number) for number in range(12)]
    uri = step(model={"layers": many})
    assert restore_item(uri, "model", {"layers": many}) == {"layers": many}
    by_text = {str(number): np.int32(0) for number in range(12)}
    found = restore_item(uri, "model", {"layers": by_text})
    assert found == {"layers": {str(number): number for number in range(12)}}


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (np.ma.masked_array(np.ones(3), [True, False, False]), "whose mask would be lost"),
        (np.ma.masked_array(np.ones(3)), "whose mask would be lost"),
        (np.ones((2, 2)).view(np.matrix), "matrix is more than an array"),
        (np.zeros(2, [("a", "i4")]).view(np.recarray), "recarray is more than an array"),
        (np.zeros(2, [("a", "i4")]), "no lossless way to store dtype"),
    ],
)
def test_an_array_that_is_more_than_its_elements_is_refused(step, leaf, reason):
    with pytest.raises(UnsupportedLeafError, match=f"a: .*{reason}"):
        step(model={"a": leaf})
    uri = step(model={"a": floats(2, 2)})
    if leaf.dtype.names is None:
        with pytest.raises(TypeError, match=reason):
            restore_item(uri, "model", {"a": leaf})


def test_an_array_that_is_mapped_from_a_file_is_an_array(step, tmp_path):
    floats(4, 4).tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", np.float32, "r", shape=(4, 4))
    found = restore_item(step(model={"a": mapped}), "model", {"a": mapped})
    assert raw(found["a"]) == raw(floats(4, 4))


def test_an_nnx_state_comes_back_with_its_variables_and_names(step):
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    graph = nnx.state(model)
    found = restore_item(step(model=graph), "model", jax.eval_shape(lambda: graph))
    assert_same(found, graph)
    assert isinstance(found["kernel"], nnx.Param)


def test_what_is_stored_can_be_asked_without_reading_it(step):
    tree = {"a": {"w": put(floats(16, 8), "fsdp")}, "key": jax.random.key(0), "u": jnp.uint4(3)}
    found = stored_tree(step(model=tree), "model")
    assert {path: (leaf.shape, str(leaf.dtype)) for path, leaf in found.items()} == {
        "a/w": ((16, 8), "float32"),
        "key": ((), "key<fry>"),
        "u": ((), "uint4"),
    }


def test_all_mismatches_are_listed_in_one_error(step):
    uri = step(
        model={
            "extra": floats(2),
            "shape": floats(4, 4),
            "dtype": floats(3),
            "key": jax.random.key(0),
            "count": np.int32(1),
            "split": floats(6),
            "fine": floats(2),
        }
    )
    uneven = NamedSharding(mesh(), PartitionSpec("fsdp"))
    target = {
        "missing": np.zeros(2, np.float32),
        "shape": jax.ShapeDtypeStruct((4, 5), np.float32),
        "dtype": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
        "key": jax.ShapeDtypeStruct((2,), np.uint32),
        "count": 1.0,
        "split": jax.ShapeDtypeStruct((6,), np.float32, sharding=uneven),
        "fine": np.zeros(2, np.float32),
    }
    with pytest.raises(TreeMismatchError) as caught:
        restore_item(uri, "model", target, path_for_errors="run@best")
    text = "\n".join(caught.value.problems)
    for expected in (
        "missing: expected by the target, not stored",
        "extra: stored, not in the target",
        "shape: expected shape (4, 5), stored (4, 4)",
        "dtype: expected dtype bfloat16, stored dtype float32",
        "key: expected shape (2,), stored ()",
        "key: expected dtype uint32, stored dtype key<fry>",
        "count: expected a Python float, stored dtype int32",
        "split: shape (6,) does not fit its sharding",
    ):
        assert expected in text
    assert "fine" not in text
    assert "run@best" in str(caught.value)
    assert text.splitlines()[0] in str(caught.value)


def test_casting_is_only_for_floating_leaves_and_only_if_asked(step):
    tree = {"w": put(floats(8, 4), "fsdp"), "n": put(np.arange(8, dtype=np.int32))}
    uri = step(model=tree)
    target = abstract(tree)
    half = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=tree["w"].sharding)
    with pytest.raises(TreeMismatchError, match="expected dtype bfloat16"):
        restore_item(uri, "model", {**target, "w": half})
    found = restore_item(uri, "model", {**target, "w": half}, cast=True)
    assert raw(found["w"]) == raw(tree["w"].astype(jnp.bfloat16))
    wrong = jax.ShapeDtypeStruct((8,), jnp.int8, sharding=tree["n"].sharding)
    with pytest.raises(TreeMismatchError, match="expected dtype int8"):
        restore_item(uri, "model", {**target, "n": wrong}, cast=True)


@pytest.mark.parametrize("stored", ["float32", "float8_e4m3"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float8_e4m3", "float8_e5m2"])
def test_a_cast_gives_the_dtype_that_was_asked_for(step, stored, wanted):
    """Also from and to the one that TensorStore does not know."""
    device = put(floats(8, 4).astype(dtype_named(stored)), "fsdp")
    tree = {"device": device, "host": np.asarray(device)}
    uri = step(model=tree)
    dtype = dtype_named(wanted)
    target = {
        "device": jax.ShapeDtypeStruct((8, 4), dtype, sharding=device.sharding),
        "host": np.zeros((8, 4), dtype),
    }
    found = restore_item(uri, "model", target, cast=True)
    assert raw(found["device"]) == raw(found["host"]) == raw(tree["host"].astype(dtype))
    assert found["device"].sharding == device.sharding


def test_without_a_sharding_a_leaf_goes_to_the_first_device(step):
    tree = {"w": put(floats(8, 4), "fsdp")}
    found = restore_item(step(model=tree), "model", {"w": jax.ShapeDtypeStruct((8, 4), "float32")})
    assert found["w"].sharding == SingleDeviceSharding(jax.devices()[0])
    assert raw(found["w"]) == raw(tree["w"])


def damage(folder, leaf: jax.Array) -> None:
    """Flip one bit in the middle of the first shard of `leaf`."""
    shard = np.asarray(leaf.addressable_shards[0].data).tobytes()
    (file,) = (file for file in Path(folder).rglob("d/*") if shard in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.find(shard) + len(shard) // 2] ^= 4
    file.write_bytes(data)


def test_many_small_leaves_are_read_in_few_reads(step, monkeypatch):
    """Each is checked; what a disk is asked does not grow with their number."""
    names = [f"{layer}/{name}" for layer in range(150) for name in ("scale", "bias")]
    tree = {name: put(floats(4 + n % 7, seed=n)) for n, name in enumerate(names)}
    tree |= {"on one": jnp.asarray(floats(3)), "host": floats(5), "rows": put(floats(8, 2), "fsdp")}
    uri, calls = step(model=tree), []
    preadv = os.preadv

    def counted(file, buffers, offset):
        calls.append(offset)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    assert_same(restore_item(uri, "model", abstract(tree)), tree)
    assert 0 < len(calls) < 30


def test_a_corrupt_chunk_is_an_error_that_names_the_leaf(step):
    tree = state()["model"]
    uri = step(model=tree)
    damage(uri.local_path, tree["layers"]["1"]["kernel"])
    with pytest.raises(CorruptionError, match=r"model: layers/1/kernel, chunk \[0, 0\]: .*crc32c"):
        restore_item(uri, "model", abstract(tree))


def test_a_lost_data_file_is_an_error(step):
    tree = {"w": put(floats(256, 256), "fsdp")}
    uri = step(model=tree)
    max(Path(uri.local_path).rglob("d/*"), key=os.path.getsize).unlink()
    with pytest.raises(CorruptionError, match=r"model: w: expected d/[0-9a-f]{32}, found no such"):
        restore_item(uri, "model", abstract(tree))
    make_plain(uri)
    with pytest.raises(CorruptionError, match=r"model/d/[0-9a-f]{32}: missing"):
        restore_item(uri, "model", abstract(tree))


def test_a_truncated_data_file_is_an_error(step):
    tree = {"w": put(floats(256, 256), "fsdp")}
    uri = step(model=tree)
    file = max(Path(uri.local_path).rglob("d/*"), key=os.path.getsize)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CorruptionError, match=r"model: w, chunk \[.*\]: .* before the end"):
        restore_item(uri, "model", abstract(tree))
    make_plain(uri)
    with pytest.raises(CorruptionError, match=r"model/d/[0-9a-f]{32}: \d+ bytes, \d+ expected"):
        restore_item(uri, "model", abstract(tree))


def test_a_changed_digit_in_the_meta_is_an_error(step):
    uri = step(model={"a": floats(2)})
    file = Path(uri.local_path) / "meta/data.json"
    file.write_text(file.read_text().replace('"step": 1', '"step": 2').replace(":1", ":2"))
    with pytest.raises(CorruptionError, match=r"meta/data\.json: expected .* crc32c"):
        read_meta(uri)
    without_manifest = CheckpointReader.open(uri)
    with pytest.raises(CorruptionError, match="the JSON item changed"):
        read_meta(without_manifest)


def test_unreadable_tree_metadata_hits_only_who_needs_it(step):
    tree = {"a": floats(2)}
    uri = step(model=tree)
    (Path(uri.local_path) / "model/_METADATA").write_text("{")
    assert_same(restore_item(uri, "model", tree), tree)
    report = verify_step(Run.open(uri.parent.parent.parent), 1)
    assert [problem.partition(": ")[0] for problem in report.problems] == ["model/_METADATA"]
    assert report.loads
    make_plain(uri)
    with pytest.raises(CorruptionError, match=r"model/_METADATA: 1 bytes"):
        restore_item(uri, "model", tree)
    with pytest.raises(CorruptionError, match="model/_METADATA"):
        CheckpointReader.open(uri).read("model", "a")


def test_what_is_no_checkpoint_is_said_so(step, tmp_path):
    uri = step(model={"a": floats(2)})
    with pytest.raises(NotFoundError, match="items meta, model"):
        restore_item(uri, "optimizer", {})
    with pytest.raises(StepNotFoundError, match="no such checkpoint"):
        restore_item(uri.parent / "9", "model", {})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file.txt").write_text("x")
    for read in (read_meta, stored_items, lambda one: stored_tree(one, "model")):
        with pytest.raises(NotACheckpointError, match=r"file\.txt"):
            read(parse_uri(tmp_path / "folder"))


def test_a_checkpoint_that_plain_orbax_wrote_restores_too(tmp_path):
    tree = {"layers": [{"w": floats(4, 4)}, {"w": floats(4, 4, seed=1)}], "scale": 2.5, "n": 3}
    ocp.save_checkpointables(tmp_path / "plain", {"model": tree})
    found = restore_item(parse_uri(tmp_path / "plain"), "model", tree)
    assert_same(found, tree)


def test_leaves_that_cannot_be_stored_are_refused(step):
    bad = {
        "object": np.array([object()]),
        "text": np.array(["a"]),
        "date": np.array(["2026-01-01"], "datetime64[D]"),
        "record": np.zeros(2, [("a", "i4")]),
        "fp6": np.zeros(2, ml_dtypes.float6_e2m3fn),
    }
    with pytest.raises(UnsupportedLeafError) as caught:
        store_form(bad)
    for name in bad:
        assert f"{name}: no lossless way to store dtype" in str(caught.value)


class Phase(enum.IntEnum):
    WARM = 1


class Seconds(float):
    pass


@pytest.mark.parametrize(("leaf", "name"), [(Phase.WARM, "Phase"), (Seconds(1.5), "Seconds")])
def test_a_number_that_is_more_than_its_value_is_refused_at_once(step, leaf, name):
    with pytest.raises(UnsupportedLeafError, match=f"a: {name} is more than a number; store its"):
        step(model={"a": leaf})
    assert restore_item(step(model={"a": leaf + 0}), "model", {"a": leaf + 0}) == {"a": leaf}


def test_some_leaves_come_alone_and_the_others_are_not_read(step):
    tree = {"a": put(floats(16, 8), "fsdp"), "b": {"c": floats(4), "d": jnp.uint4(3)}}
    uri = step(model=tree)
    found = restore_leaves(uri, "model", abstract(tree), ["b/c", "a"])
    assert sorted(found) == ["a", "b/c"]
    assert_same({"a": found["a"], "b": {"c": found["b/c"]}}, {**tree, "b": {"c": tree["b"]["c"]}})
    found = restore_leaves(uri, "model", abstract(tree), ["b/d"])
    assert_same({"d": found.pop("b/d")}, {"d": tree["b"]["d"]})
    assert not found
    with pytest.raises(TreeMismatchError, match="b/c: stored, not in the target"):
        restore_leaves(uri, "model", {"a": tree["a"]}, ["a"])


@pytest.mark.parametrize("paths", [["nope", "a", "b"], "a", {"nope": 1}])
def test_leaves_that_there_are_not_are_named(step, paths):
    tree = {"a": floats(4), "b": {"c": floats(4)}}
    with pytest.raises(LeafNotFoundError, match="no such leaves") as caught:
        restore_leaves(step(model=tree), "model", abstract(tree), paths)
    assert "'b/c'" in caught.value.next_step
    assert ("'b'" in caught.value.found) == ("b" in paths)


def test_what_jax_may_move_in_the_target_it_may_move_in_what_is_restored(step):
    """Else a counter that sits on the first device keeps a sharded state out of `jit`."""
    tree = {
        "w": put(floats(64, 8), "fsdp"),
        "count": jnp.float32(3),
        "key": jax.random.key(1),
        "none": jnp.zeros((0, 2)),
        "fixed": jax.device_put(floats(3), jax.devices()[1]),
    }
    uri = step(model=tree)
    found = restore_item(uri, "model", tree)
    assert_same(found, tree)
    assert {name for name, leaf in found.items() if not leaf.committed} == {"count", "key", "none"}
    assert found["fixed"].devices() == {jax.devices()[1]}
    together = jax.jit(lambda tree: tree["w"] * tree["count"])(
        {name: found[name] for name in ("w", "count")}
    )
    np.testing.assert_array_equal(np.asarray(together), np.asarray(tree["w"]) * 3)
    described = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in tree.items()}
    assert not any(leaf.committed for leaf in restore_item(uri, "model", described).values())
