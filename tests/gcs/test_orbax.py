"""Orbax saves to and loads from the double, with nothing but the environment set."""

import os

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from tests.programs.program import run


@pytest.fixture
def tree():
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(rng.standard_normal((64, 32), dtype=np.float32), sharding)
        for name in ("kernel", "bias")
    }


def abstract(tree):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def test_asynchronous_save_is_loaded_bit_for_bit(gcs, tree):
    ocp.save_async(f"{gcs.bucket_uri}/run/1", tree).result()
    loaded = ocp.load(f"{gcs.bucket_uri}/run/1", abstract(tree))
    for name, leaf in tree.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), np.asarray(leaf))
    assert any(name.endswith("commit_success.txt") for name in gcs.names())


def test_checkpoint_that_fails_for_lack_of_room_is_an_error(gcs, tree):
    gcs.set_quota(10_000)
    with pytest.raises(Exception, match="quota"):
        ocp.save_async(f"{gcs.bucket_uri}/run/1", tree).result()
    assert not any(name.endswith("commit_success.txt") for name in gcs.names())


SAVE_WITHOUT_DISK = """
import resource
import sys

import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # from here on every write to a file fails
try:
    with open(sys.argv[2], "wb", buffering=0) as file:
        file.write(b"x")
except OSError:
    ocp.save_async(sys.argv[1], {"kernel": jnp.arange(1000.0)}).result()
"""


def test_save_needs_no_writable_local_disk(gcs, tmp_path):
    environment = {**os.environ, "HOME": "/nonexistent", "TMPDIR": "/nonexistent"}
    saved = run(
        ["-c", SAVE_WITHOUT_DISK, f"{gcs.bucket_uri}/1", tmp_path / "probe"], env=environment
    )
    assert saved.returncode == 0, saved.stderr
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"kernel": jax.ShapeDtypeStruct((1000,), np.float32, sharding=here)}
    loaded = ocp.load(f"{gcs.bucket_uri}/1", target)
    np.testing.assert_array_equal(np.asarray(loaded["kernel"]), np.arange(1000, dtype=np.float32))
