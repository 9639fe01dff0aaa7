"""Loads of arrays that several processes hold; runs in all of them."""

from __future__ import annotations

import math
import os
import signal
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import cairn
from cairn.state.checkpointing.processes import agreement, exchange
from tests.gcs.server import client_environment
from tests.multi_process.scenarios import error_of, tell, wait_for
from tests.multi_process.seams import background, shared_leaves

BUCKET = "replicas"
RUN = f"gs://{BUCKET}/run"
BATCH_BYTES = 1 << 20
"""So that what is loaded here takes several batches."""


def leaves() -> dict[str, Any]:
    """What is stored; about 13 MB."""
    numbers = np.random.default_rng(0)
    words = numbers.integers(0, 2**32, (2048, 1024), np.uint32)
    return {
        "words": words,
        "columns": words[:2, : 1 << 18].reshape(2, -1),
        "odd": numbers.integers(0, 2**32, (524309,), np.uint32),
        "bfloat16": numbers.standard_normal((515, 514)).astype(ml_dtypes.bfloat16),
        "int4": numbers.integers(-8, 8, (301, 64)).astype(ml_dtypes.int4),
        "bool": numbers.integers(0, 2, (77, 3)).astype(bool),
        "scalar": np.float32(3.5).reshape(()),
        "rows": numbers.integers(0, 2**32, (64, 32), np.uint32),
        "empty": np.zeros((0, 4), np.float32),
    }


SPECS = {"words": ("split", None), "rows": (None, "split")}
"""Which leaves are divided where there is an axis that divides; the others are replicated.

The slices of the first are whole chunks. Those of the second share one, which is read for each.
"""


def target(split: int) -> dict[str, Any]:
    """The leaves on all devices: `split` slices, each held by as many processes as there are."""
    devices = np.array(jax.devices()).reshape(-1, split)
    mesh = Mesh(devices, ("copies", "split"), axis_types=(AxisType.Auto,) * 2)
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*SPECS.get(name, ()))),
        )
        for name, leaf in leaves().items()
    }


def save(url: str, run: str = RUN) -> None:
    os.environ.update(client_environment(url))
    with cairn.Checkpointer(run) as checkpointer:
        items = jax.tree.map(jnp.asarray, leaves())
        checkpointer.save(1, {"model": items, "key": {"key": jax.random.key(7)}}).wait()


def load(urls: list[str], split: int, once: str) -> int:
    """Loads all, each process from its own server; how many leaves are what was saved, here."""
    os.environ.update(client_environment(urls[jax.process_index()]))
    os.environ[shared_leaves.READ_ONCE] = once
    wanted = target(split)
    mesh = wanted["words"].sharding.mesh
    with mock.patch.object(shared_leaves, "BATCH_BYTES", BATCH_BYTES), jax.set_mesh(mesh):
        found = cairn.load(RUN, {"model": wanted})["model"]
    for name, leaf in found.items():
        assert leaf.sharding == wanted[name].sharding
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, leaves()[name][shard.index], err_msg=name)
    return len(found)


def load_otherwise(urls: list[str], once: list[str]) -> list[str]:
    """Loads of processes that do not ask for the same are loads all the same."""
    me = int(jax.process_index())
    os.environ.update(client_environment(urls[me]))
    os.environ[shared_leaves.READ_ONCE] = once[me]
    found = cairn.load(RUN, {"model": target(1), "key": {"key": jax.random.key(0)}})
    key = jax.random.key_data(found["key"]["key"])
    assert np.array_equal(key, jax.random.key_data(jax.random.key(7)))
    for name, leaf in found["model"].items():
        np.testing.assert_array_equal(leaf.addressable_data(0), leaves()[name], err_msg=name)
    return sorted(found["model"])


def fail(urls: list[str], folder: str) -> dict[str, Any]:
    """A read that fails on process 1; then a process that does not come to the exchange."""
    me = int(jax.process_index())
    os.environ.update(client_environment(urls[me]))
    told: dict[str, Any] = {}
    real = shared_leaves._read_streams

    def broken(*given: Any) -> Any:
        if me == 1:
            raise cairn.StoreUnavailableError("the disk of this process is gone")
        return real(*given)

    with mock.patch.object(shared_leaves, "_read_streams", broken):
        told["fails"] = error_of(lambda: cairn.load(RUN, {"model": target(1)}))
    told["late"] = error_of(lambda: load_late(me, folder))
    told["after that"] = len(cairn.load(RUN, {"model": target(1)})["model"])
    return told


def stop(urls: list[str]) -> dict[str, Any]:
    """Process 1 is stopped as it comes to an exchange, and goes on once the other has given up."""
    me = int(jax.process_index())
    os.environ.update(client_environment(urls[me]))
    (_, other) = agreement.collect(os.getpid())
    real = background.collective

    def stopped(*given: Any) -> Any:
        if me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*given)

    told: dict[str, Any] = {}
    with (
        mock.patch.object(exchange, "LATE_SECONDS", 4.0),
        mock.patch.object(background, "LATE_SECONDS", 4.0),
        mock.patch.object(background, "collective", stopped),
    ):
        told["stops"] = error_of(lambda: cairn.load(RUN, {"model": target(1)}))
    if me == 0:
        os.kill(other, signal.SIGCONT)
    told["after that"] = len(cairn.load(RUN, {"model": target(1)})["model"])
    return told


def load_late(me: int, folder: str) -> None:
    """A load in which process 1 reads until the other has given it up."""
    real = shared_leaves._read_streams

    def slow(*given: Any) -> Any:
        if me == 1:
            wait_for(folder, "given up", [0])
        return real(*given)

    with (
        mock.patch.object(exchange, "LATE_SECONDS", 4.0),
        mock.patch.object(shared_leaves, "_read_streams", slow),
    ):
        try:
            cairn.load(RUN, {"model": target(1)})
        finally:
            tell(folder, "given up")


def stored_bytes() -> int:
    """What the leaves take: int4 lies packed."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // (2 if leaf.dtype == ml_dtypes.int4 else 1)
        for leaf in leaves().values()
    )
