"""Four-bit leaves take half a byte each on disk, and nobody who reads them has to know."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from cairn import Checkpointer, CheckpointReader, CorruptionError, Run
from cairn.state.checkpointing.restore import restore_item
from cairn.storage.arrays.four_bits import pack, packed_axis, packed_shape, packing_axis, unpack
from cairn.storage.runs.records.step_index import open_contents
from tests.storage.states import abstract, assert_same, mesh, put

DTYPES = ("int4", "uint4")


def codes(dtype, *shape):
    low = -8 if dtype == "int4" else 0
    values = np.random.default_rng(0).integers(low, low + 16, shape)
    return values.astype(getattr(ml_dtypes, dtype))


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_unpack_undoes_pack_along_every_axis_of_even_size(data, shape):
    dtype = data.draw(st.sampled_from(DTYPES))
    axis = packing_axis(shape)
    if axis is None:
        assert all(size % 2 for size in shape)
        return
    values = codes(dtype, *shape)
    packed = pack(values, axis)
    assert packed.dtype == np.uint8
    assert packed.shape == packed_shape(shape, axis)
    assert packed_axis(shape, packed.shape) == axis
    again = unpack(packed, dtype, axis)
    assert again.dtype == values.dtype
    np.testing.assert_array_equal(again.astype(np.int32), values.astype(np.int32))


def test_a_shape_that_is_not_the_packed_one_is_refused():
    with pytest.raises(ValueError, match=r"\(4, 4\) is not \(4, 4\) with one axis halved"):
        packed_axis((4, 4), (4, 4))


@pytest.fixture
def saved(tmp_path):
    """Saves a model item as step 1 of a new run; gives the step's folder and its manifest."""

    def save(tree):
        with Checkpointer(tmp_path / "run", writer_id="job") as made:
            made.save(1, {"model": tree}, meta={}).wait()
        run = Run.open(made.uri)
        (info,) = run.steps()
        return run.step_uri(info), run.manifest(info)

    return save


def test_the_manifest_tells_elements_and_the_files_hold_half_a_byte_each(saved):
    tree = {name: put(codes(name, 256, 512), "fsdp") for name in DTYPES}
    uri, manifest = saved(tree)
    contents = open_contents(uri, manifest)
    for leaf in contents.leaves:
        assert (leaf.dtype, leaf.shape, leaf.nbytes) == (leaf.path, (256, 512), 256 * 512 // 2)
        assert leaf.shards == (64, 512)
    data = sum(file.size for file in contents.objects if "/d/" in file.name)
    assert 256 * 512 <= data < 1.1 * 256 * 512
    plain = ocp.metadata(uri.local_path, "model").metadata["uint4"]
    assert (plain.dtype, tuple(plain.shape)) == (np.uint8, (256, 256))


@pytest.mark.parametrize("with_manifest", [True, False])
def test_the_reader_reads_every_kind_of_part(saved, with_manifest):
    tree = {"rows": put(codes("int4", 24, 20), "fsdp"), "odd": codes("uint4", 6, 5)}
    uri, manifest = saved(tree)
    reader = CheckpointReader.open(uri, manifest if with_manifest else None)
    for path, leaf in tree.items():
        host = np.asarray(leaf)
        info = reader.leaf("model", path)
        assert (info.shape, info.dtype) == (host.shape, host.dtype)
        for index in (
            ...,
            (slice(1, 4), slice(1, 4)),
            (slice(None), slice(3, None, 2)),
            (slice(1, 6, 3), 3),
            (-1, slice(2, 2)),
            (5, 4),
        ):
            found = reader.read("model", path, index)
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found.astype(int), host[index].astype(int))
        for transpose in (False, True):
            blocks = list(reader.iter_blocks("model", path, max_bytes=7, transpose=transpose))
            flat = np.concatenate([block.reshape(-1) for block in blocks]).astype(int)
            expected = (host.T if transpose else host).astype(int).reshape(-1)
            np.testing.assert_array_equal(flat, expected)


@pytest.mark.parametrize("spec", [("fsdp", None), (None, "fsdp"), (("dp", "fsdp"), None), ()])
def test_packed_leaves_restore_onto_any_sharding(saved, spec):
    """Columns over four devices are one each: bytes would be cut in two, and are not."""
    tree = {name: put(codes(name, 8, 4), "dp", None) for name in DTYPES}
    uri, _ = saved(tree)
    target = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh(), PartitionSpec(*spec))
        )
        for name, leaf in tree.items()
    }
    found = restore_item(uri, "model", target)
    for name, leaf in found.items():
        assert leaf.sharding.spec == PartitionSpec(*spec)
        np.testing.assert_array_equal(
            np.asarray(leaf).astype(int), np.asarray(tree[name]).astype(int)
        )


def test_packed_leaves_restore_onto_one_device_and_the_host(saved):
    tree = {"device": put(codes("uint4", 8, 6), "fsdp"), "host": codes("int4", 3, 2)}
    uri, _ = saved(tree)
    assert_same(restore_item(uri, "model", abstract(tree)), tree)
    one = SingleDeviceSharding(jax.devices()[3])
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one)
        for name, leaf in tree.items()
    }
    found = restore_item(uri, "model", target)
    for name, leaf in found.items():
        assert leaf.sharding == one
        np.testing.assert_array_equal(
            np.asarray(leaf).astype(int), np.asarray(tree[name]).astype(int)
        )


def test_shards_of_odd_size_are_not_packed_across_devices(saved):
    tree = {"w": put(codes("uint4", 4, 3), "fsdp")}
    uri, manifest = saved(tree)
    (leaf,) = open_contents(uri, manifest).leaves
    assert leaf.shards == (1, 3)
    assert_same(restore_item(uri, "model", abstract(tree)), tree)


def test_bytes_that_are_not_the_packed_leaf_are_an_error(saved):
    import json
    from pathlib import Path

    tree = {"w": codes("uint4", 8, 6)}
    uri, _ = saved(tree)
    file = Path(uri.local_path, "_CHECKPOINT_METADATA")
    described = json.loads(file.read_text())
    described["custom_metadata"]["cairn"]["forms"]["model"]["w"][1] = [8, 60]
    file.write_text(json.dumps(described))
    with pytest.raises(CorruptionError, match=r"uint4\[8, 60\], two in a byte"):
        CheckpointReader.open(uri).read("model", "w")
    assert_same(restore_item(uri, "model", tree), tree)  # by the step's index
