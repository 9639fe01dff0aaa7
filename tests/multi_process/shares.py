"""What the processes of a job write of arrays that they share, and read of what all wrote."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cairn import Checkpointer, ObjectStore, open_files, parse_uri
from cairn.state.checkpointing.restore import restore_item
from cairn.state.checkpointing.trees import flatten
from tests.multi_process.scenarios import SAVE_SECONDS
from tests.multi_process.seams import host_arrays, host_trees, preparation
from tests.state.checkpointing.restores.elsewhere import devices_elsewhere

ROWS, COLUMNS = 512, 1024
"""2 MiB of words: enough to be divided among the processes that hold them all."""

WAVE_BYTES = 3 << 20
WINDOW_BYTES = 1 << 20


def numbers(seed: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


def host_items() -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """What step 1 stores."""
    shared = {"w": numbers(0), "tall": numbers(1, (1 << 19, 1))}
    placed = {
        "rows": numbers(2),
        "columns": numbers(3),
        "both": numbers(4),
        "partly": numbers(5),
        "small": numbers(6, (3, 5)),
        "odd": numbers(7, (524309,)),
    }
    return {"model": shared, "optimizer": placed}


def advance(leaf: jax.Array) -> jax.Array:
    return leaf * jnp.uint32(1664525) + jnp.uint32(1013904223)


def advanced(host: np.ndarray[Any, Any], steps: int) -> np.ndarray[Any, Any]:
    """What `advance` makes of an array in so many steps."""
    for _ in range(steps):
        host = host * np.uint32(1664525) + np.uint32(1013904223)
    return host


def placements(axes: tuple[int, int]) -> dict[str, NamedSharding]:
    """By leaf; the devices are in an order that is not that of the processes."""
    count = jax.device_count()
    devices = np.array([*jax.devices()[::2], *jax.devices()[1::2]]).reshape(axes)
    assert devices.size == count
    on = Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = {
        "rows": ("b",),
        "columns": (None, ("a", "b")),
        "both": ("a", "b"),
        "partly": ("a", None),
    }
    return {
        f"{item}/{name}": NamedSharding(on, PartitionSpec(*specs.get(name, ())))
        for item, leaves in host_items().items()
        for name in leaves
    }


def save_and_read(runs: list[str], axes: tuple[int, int], other: tuple[int, int]) -> int:
    """Saves two steps to every run while a donating step goes on; reads them on another mesh.

    To a run called "kept" from buffers that are; to one called "waves" as from an accelerator, with
    less memory than there is to copy, and from it likewise.

    Gives how many leaves are, on the devices of this process, what was saved.
    """
    where, elsewhere = placements(tuple(axes)), placements(tuple(other))
    hosts = host_items()
    items = {
        item: {
            name: jax.make_array_from_callback(
                host.shape, where[f"{item}/{name}"], lambda index, host=host: host[index]
            )
            for name, host in leaves.items()
        }
        for item, leaves in hosts.items()
    }
    step_fn = jax.jit(advance, donate_argnums=0)
    handles = []
    for step in (1, 2):
        for run in runs:
            checkpointer = Checkpointer.for_run(
                run,
                reuse_buffers=run.endswith("kept"),
                host_memory=WAVE_BYTES if run.endswith("waves") else None,
            )
            with memory_of(run):
                handles.append(checkpointer.save(step, items, meta={}))
            assert (handles[-1].waves > 2) == run.endswith("waves")
        items = jax.tree.map(step_fn, items)
    for handle in handles:
        handle.wait(SAVE_SECONDS)
    right = 0
    for handle in handles:
        for item, leaves in hosts.items():
            target = {
                name: jax.ShapeDtypeStruct(
                    host.shape, host.dtype, sharding=elsewhere[f"{item}/{name}"]
                )
                for name, host in leaves.items()
            }
            with memory_of(str(handle.uri.parent.parent.parent)):
                found = flatten(restore_item(handle.uri, item, target))
            for name, host in leaves.items():
                expected = advanced(host, handle.step - 1)
                right += all(
                    np.array_equal(shard.data, expected[shard.index])
                    for shard in found[name].addressable_shards
                )
    return right


@contextlib.contextmanager
def memory_of(run: str) -> Iterator[None]:
    """Whether the devices' memory is the host's, while a run is saved to or read."""
    with contextlib.ExitStack() as stack:
        if run.endswith("waves"):
            stack.enter_context(devices_elsewhere(WINDOW_BYTES))
        for module in (host_arrays, host_trees, preparation):
            here = not run.endswith("waves")
            stack.enter_context(mock.patch.object(module, "on_host", lambda here=here: here))
        yield


def save_a_base_that_steps_give_back(run: str, axes: tuple[int, int]) -> list[str]:
    """Saves eight steps, as from accelerators, of a base that each step is given and gives back.

    Before the seventh some of it changes, on the devices of process 1 alone.

    Gives what is copied for each save, in this process: "b" for the base, "a" for the adapter.
    """
    whole = numbers(0, (64, 1024))
    place = placements(tuple(axes))["optimizer/rows"]
    base = jax.make_array_from_callback(whole.shape, place, whole.__getitem__)
    adapter = jax.make_array_from_callback((64, 1), place, numbers(1, (64, 1)).__getitem__)
    given_back = jax.jit(lambda leaf: leaf, donate_argnums=0)
    copied: list[str] = []
    start = host_arrays.Transfers.start

    def started(transfers: host_arrays.Transfers, parts: list[tuple[str, int]]) -> None:
        copied[-1] += "".join(sorted({path[0] for path, _ in parts}))
        start(transfers, parts)

    with memory_of("waves"), mock.patch.object(host_arrays.Transfers, "start", started):
        for step in range(1, 9):
            if step == 7:
                changed = changed_by_process_one(whole)
                base = jax.make_array_from_callback(whole.shape, place, changed.__getitem__)
            copied.append("")
            handle = Checkpointer.for_run(run).save(
                step, {"model": {"base": base}, "lora": {"adapter": adapter}}, meta={}
            )
            base, adapter = given_back(base), advance(adapter)
            handle.wait(SAVE_SECONDS)
            for thread in threading.enumerate():
                if thread.name == "cairn-digests":
                    thread.join(SAVE_SECONDS)
    return copied


def changed_by_process_one(whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The base from the seventh save on."""
    changed = whole.copy()
    changed[-1, 0] += 1
    return changed


def save_over_damage(run: str, axes: tuple[int, int]) -> list[str]:
    """Saves three steps of one state; cuts the largest file of process 1 short after the first.

    Gives the file's name, in process 0.
    """
    where = placements(tuple(axes))
    items = {
        item: {
            name: jax.make_array_from_callback(
                host.shape, where[f"{item}/{name}"], lambda index, host=host: host[index]
            )
            for name, host in leaves.items()
        }
        for item, leaves in host_items().items()
    }
    damaged = []
    for step in (1, 2, 3):
        handle = Checkpointer.for_run(run).save(step, items, meta={})
        handle.wait(SAVE_SECONDS)
        if step == 1 and jax.process_index() == 0:
            others = [one for one in open_files(handle.uri).walk() if "process_1/d/" in one.name]
            damaged = [max(others, key=lambda one: one.size).name]
            ObjectStore.open(handle.uri).write(damaged[0], b"short")
    return damaged


def save_where_a_run_was_deleted(runs: list[str]) -> list[list[int]]:
    """Saves a step to every run, which process 0 then deletes; does so again, and keeps it.

    Gives (step, attempt) of each of the last saves.
    """
    found = []
    for run in runs:
        for last in (False, True):
            whole = numbers(int(last), (64, 32))
            on = placements((jax.device_count(), 1))["optimizer/both"]
            leaf = jax.make_array_from_callback(whole.shape, on, whole.__getitem__)
            with Checkpointer(run) as checkpointer:
                handle = checkpointer.save(1, {"model": {"w": leaf}}, meta={})
                handle.wait(SAVE_SECONDS)
            if last:
                found.append([handle.step, handle.attempt])
            elif jax.process_index() == 0:
                open_files(parse_uri(run).parent).delete_tree(parse_uri(run).name)
    return found
