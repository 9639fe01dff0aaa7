"""Steps saved with `compression="zstd"`: smaller, read by all readers, and checked as all are."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from cairn import (
    Checkpointer,
    CheckpointReader,
    CorruptionError,
    Run,
    StorageError,
    UnsupportedFormatError,
    verify_step,
)
from cairn.state.checkpointing.restore import restore_item
from cairn.storage.runs.records.manifest import LeafRecord
from tests.faults.report import is_long, trials
from tests.storage.states import abstract, assert_same, floats, mesh, put, state
from tests.stores import STORES

KIB = 1024


def compressible():
    """Counters: little information in many bytes; keys and packed numbers too."""
    values = np.arange(512 * 64, dtype=np.float32).reshape(512, 64) // 64
    return {
        "rows": put(values, "fsdp", None),
        "columns": put(values.T.copy(), None, "fsdp"),
        "bfloat16": put(values, "dp", None).astype(jnp.bfloat16),
        "int4": jnp.asarray(values % 7, jnp.int4),
        "key": jax.random.key(7),
        "scalar": jnp.float32(3),
        "host": values[:3],
    }


def save(uri, items, *, step=1, **options):
    with Checkpointer(uri, writer_id="job") as checkpointer:
        handle = checkpointer.save(step, items, meta={"step": step}, **options)
        handle.wait()
    return handle


def stored_bytes(run_uri, step):
    run = Run.open(run_uri)
    return run.manifest(run.step(step)).nbytes


def test_a_compressed_step_is_smaller_and_comes_back_bit_equal(some_root_uri):
    items = {"model": compressible(), **state()}
    plain = save(some_root_uri / "plain", items)
    packed = save(some_root_uri / "packed", items, compression="zstd")
    for handle in (plain, packed):
        for name, tree in items.items():
            assert_same(restore_item(handle.uri, name, abstract(tree)), tree)
    only = {"model": compressible()}
    save(some_root_uri / "plain", only, step=2)
    save(some_root_uri / "packed", only, step=2, compression="zstd")
    assert stored_bytes(some_root_uri / "packed", 2) < 0.5 * stored_bytes(
        some_root_uri / "plain", 2
    )


@pytest.mark.without_s3("plain Orbax does not read it")
def test_plain_orbax_reads_a_compressed_step(some_root_uri):
    tree = {name: leaf for name, leaf in compressible().items() if name != "int4"}  # two in a byte
    handle = save(some_root_uri / "run", {"model": tree}, compression="zstd")
    loaded = ocp.load(handle.uri.orbax_path(), abstract(tree), checkpointable_name="model")
    assert_same(loaded, tree)


def test_a_compressed_step_is_restored_on_other_devices_and_read_by_part(some_root_uri):
    tree = compressible()
    handle = save(some_root_uri / "run", {"model": tree}, compression="zstd")
    target = abstract(tree, mesh(4))
    found = restore_item(handle.uri, "model", target)
    assert found["rows"].sharding.mesh.size == 4
    np.testing.assert_array_equal(np.asarray(found["rows"]), np.asarray(tree["rows"]))
    reader = CheckpointReader.open(handle.uri)
    part = reader.read("model", "columns", index=(slice(3, 9), slice(100, 200, 7)))
    np.testing.assert_array_equal(part, np.asarray(tree["columns"])[3:9, 100:200:7])


def test_the_manifest_names_the_compression_and_is_silent_without(some_root_uri):
    tree = {"model": {"w": put(floats(64, 32)), "empty": jnp.zeros((0, 3))}}
    save(some_root_uri / "run", tree, compression="zstd")
    save(some_root_uri / "run", tree, step=2)
    run = Run.open(some_root_uri / "run")
    leaves = {leaf.path: leaf.compression for leaf in run.contents(run.step(1)).leaves}
    assert leaves == {"w": "zstd", "empty": None}
    plain = run.contents(run.step(2))
    assert {leaf.compression for leaf in plain.leaves} == {None}
    assert b"compression" not in plain.directory.to_bytes()
    assert "compression" not in LeafRecord(item="m", path="w", shape=(), dtype="int8").model_dump()


def test_every_flipped_bit_of_compressed_values_is_found(tmp_path):
    tree = {"model": {"w": put(np.arange(4096.0, dtype=np.float32).reshape(64, 64), "fsdp")}}
    handle = save(tmp_path / "run", tree, compression="zstd")
    run = Run.open(tmp_path / "run")
    info = run.step(1)
    assert not verify_step(run, info).problems
    (file,) = Path(handle.uri.local_path, "model", "d").iterdir()
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    for bit in random.choice(8 * len(whole), trials(short=25, long=400), replace=False):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(flipped)
        with pytest.raises(CorruptionError, match="w"):
            restore_item(handle.uri, "model", abstract(tree["model"]))
        assert verify_step(run, info).problems
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(CorruptionError):
            restore_item(handle.uri, "model", abstract(tree["model"]))


@pytest.mark.parametrize("some_root_uri", STORES if is_long() else ["file"], indirect=True)
def test_a_change_of_compression_writes_unchanged_leaves_again(some_root_uri):
    """Linked files would not be what the new step's description says of them."""
    frozen = {"w": put(np.ones((256, 256), np.float32), "fsdp")}
    handles = []
    with Checkpointer(some_root_uri / "run", writer_id="job") as checkpointer:
        for step, compression in enumerate((None, "zstd", "zstd", None), start=1):
            handles.append(
                checkpointer.save(
                    step, {"model": frozen}, meta={"step": step}, compression=compression
                )
            )
            handles[-1].wait()
    for handle in handles:
        assert_same(restore_item(handle.uri, "model", abstract(frozen)), frozen)
    sizes = [stored_bytes(some_root_uri / "run", step) for step in (1, 2, 3, 4)]
    assert sizes[1] < 0.2 * sizes[0]
    assert sizes[2] < 0.2 * sizes[0]
    assert sizes[3] > 0.9 * sizes[0]
    if some_root_uri.scheme == "file":
        for one, links in zip(handles, (1, 2, 2, 1), strict=True):
            (file,) = Path(one.uri.local_path, "model", "d").iterdir()
            assert file.stat().st_nlink == links


@pytest.mark.parametrize("compression", ["gzip", "", True, 3])
def test_an_unknown_compression_is_refused_and_nothing_is_stored(some_root_uri, compression):
    with pytest.raises(UnsupportedFormatError, match=r"compression.*expected.*'zstd'"):
        save(some_root_uri / "run", {"model": {"w": floats(3)}}, compression=compression)
    with pytest.raises(StorageError):
        Run.open(some_root_uri / "run")
