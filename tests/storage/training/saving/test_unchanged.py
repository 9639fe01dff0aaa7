"""Leaves that stay as they are between saves are linked, and every step stays whole by itself."""

import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from cairn.storage.errors import SaveError
from cairn.storage.reading.verify import verify_step
from cairn.storage.runs.run import Run
from cairn.storage.runs.trash import delete_step
from cairn.storage.store import open_files
from cairn.storage.store.objects import ObjectStore
from cairn.storage.training.checkpointer import Checkpointer
from cairn.storage.training.restore import restore_item
from cairn.storage.training.saving import unchanged
from tests.storage.states import abstract, assert_same, floats, put

KIB = 1024


@pytest.fixture
def checkpointer(root_uri):
    with Checkpointer(root_uri / "run", writer_id="job") as made:
        yield made


def base():
    return {name: put(floats(256, 256), "fsdp") for name in ("q", "k", "v")}


def adapters(seed):
    return {"a": put(floats(256, 4, seed=seed), "fsdp"), "b": put(floats(4, 256, seed=seed + 1))}


def save(checkpointer, step, frozen, trained):
    items = {"model": {"base": frozen, "lora": trained}, "optimizer": {"mu": trained}}
    handle = checkpointer.save(step, items, meta={"step": step})
    handle.wait()
    return handle, items


def written_bytes(folder, links: int = 1) -> int:
    """Bytes of the files below a local folder that have no more names than this."""
    found = (file.stat() for file in Path(folder.local_path).rglob("*") if file.is_file())
    return sum(one.st_size for one in found if one.st_nlink <= links)


def assert_whole(handle, items):
    """Cairn and plain Orbax both read the step, bit for bit."""
    for name, tree in items.items():
        assert_same(restore_item(handle.uri, name, abstract(tree)), tree)
        loaded = ocp.load(handle.uri.orbax_path(), abstract(tree), checkpointable_name=name)
        assert_same(loaded, tree)


def test_a_frozen_base_is_not_written_again(checkpointer, root_uri):
    frozen = base()
    first, items = save(checkpointer, 1, frozen, adapters(1))
    assert_whole(first, items)
    second, items = save(checkpointer, 2, frozen, adapters(2))
    assert_whole(second, items)
    if root_uri.scheme == "file":
        frozen_bytes = sum(leaf.nbytes for leaf in frozen.values())
        assert written_bytes(first.uri, links=2) > frozen_bytes
        assert written_bytes(second.uri) < 64 * KIB < frozen_bytes


def test_equal_values_in_new_arrays_are_recognised(checkpointer, root_uri):
    """A jitted step that passes the base through gives arrays of its own."""
    frozen = base()
    save(checkpointer, 1, frozen, adapters(1))
    passed = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(frozen)
    second, items = save(checkpointer, 2, passed, adapters(2))
    assert_whole(second, items)
    if root_uri.scheme == "file":
        assert written_bytes(second.uri) < 64 * KIB


@pytest.mark.parametrize("where", [0, 77_777 % (256 * 256), 256 * 256 - 1])
def test_one_changed_element_of_a_leaf_is_stored(checkpointer, where):
    frozen = base()
    save(checkpointer, 1, frozen, adapters(1))
    changed = frozen["k"].at[where // 256, where % 256].add(1e-3)
    changed = jax.device_put(changed, frozen["k"].sharding)
    second, items = save(checkpointer, 2, {**frozen, "k": changed}, adapters(2))
    assert_whole(second, items)


def test_a_leaf_of_another_shape_dtype_or_sharding_is_stored(checkpointer):
    frozen = base()
    save(checkpointer, 1, frozen, adapters(1))
    other = {
        "q": frozen["q"].astype(jnp.bfloat16),
        "k": put(np.asarray(frozen["k"]), None, "fsdp"),
        "v": put(np.asarray(frozen["v"]).reshape(512, 128), "fsdp"),
    }
    second, items = save(checkpointer, 2, other, adapters(2))
    assert_whole(second, items)


def test_numpy_arrays_that_their_owner_changed_are_stored(checkpointer):
    host = {"table": floats(256, 256)}
    first, _ = save(checkpointer, 1, host, adapters(1))
    before = {"table": host["table"].copy()}
    host["table"][3, 5] += 1
    second, items = save(checkpointer, 2, host, adapters(2))
    assert_whole(second, items)
    found = restore_item(first.uri, "model", abstract({"base": before, "lora": adapters(1)}))
    assert_same(found["base"], before)


def test_a_step_is_whole_after_the_one_whose_files_it_links_is_deleted(checkpointer, root_uri):
    frozen = base()
    first, _ = save(checkpointer, 1, frozen, adapters(1))
    second, items = save(checkpointer, 2, frozen, adapters(2))
    if root_uri.scheme == "file":
        shutil.rmtree(first.uri.local_path)
    else:
        checkpointer._run.objects.delete_prefix("attempts/1/1/")
    assert_whole(second, items)
    run = Run.open(checkpointer.uri)
    assert verify_step(run, 2).ok
    third, items = save(checkpointer, 3, frozen, adapters(3))
    assert_whole(third, items)


def test_files_of_a_step_that_is_gone_are_written_again(checkpointer, root_uri):
    frozen = base()
    first, _ = save(checkpointer, 1, frozen, adapters(1))
    if root_uri.scheme == "file":
        shutil.rmtree(first.uri.local_path)
    else:
        checkpointer._run.objects.delete_prefix("attempts/1/1/")
    second, items = save(checkpointer, 2, frozen, adapters(2))
    assert_whole(second, items)
    assert verify_step(Run.open(checkpointer.uri), 2).ok


def test_leaves_of_a_step_whose_file_was_cut_short_are_written_again(checkpointer, root_uri):
    """In a store at once after the save that finds it; nothing stored is touched."""
    frozen = base()
    first, _ = save(checkpointer, 1, frozen, adapters(1))
    value_file = max(open_files(first.uri).walk(), key=lambda entry: entry.size).name
    ObjectStore.open(first.uri).write(value_file, b"short")
    if root_uri.scheme == "gs":
        with pytest.raises(SaveError, match="not what was written"):
            save(checkpointer, 2, frozen, adapters(2))
    for step in (2, 3):
        handle, items = save(checkpointer, step, frozen, adapters(step))
        assert_whole(handle, items)
        assert verify_step(Run.open(checkpointer.uri), step).ok
    assert open_files(first.uri).stat(value_file).size == len(b"short")


def test_where_nothing_can_be_linked_all_is_written(tmp_path, monkeypatch):
    def refused(*args, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    frozen = base()
    with Checkpointer(tmp_path / "run", writer_id="job") as made:
        save(made, 1, frozen, adapters(1))
        second, items = save(made, 2, frozen, adapters(2))
        assert_whole(second, items)
        assert written_bytes(second.uri) > sum(leaf.nbytes for leaf in frozen.values())


def test_a_file_of_which_little_is_still_wanted_is_not_linked(tmp_path, monkeypatch):
    """Else each step would carry along what no step needs."""
    frozen = base()
    small = {"s": put(floats(16, 16))}
    with Checkpointer(tmp_path / "run", writer_id="job") as made:
        made.save(1, {"model": {**frozen, **small}}, meta={}).wait()
        changed = {name: leaf + 1 for name, leaf in frozen.items()}
        handle = made.save(2, {"model": {**changed, **small}}, meta={})
        handle.wait()
        assert written_bytes(handle.uri) == written_bytes(handle.uri, links=2)
    assert 0 < unchanged._LEAST_LIVE <= 1


def test_a_save_that_failed_is_not_built_upon(checkpointer, monkeypatch):
    frozen = base()
    save(checkpointer, 1, frozen, adapters(1))
    with monkeypatch.context() as patch:
        patch.setattr("cairn.storage.runs.writer.publish_manifest", _refuse)
        with pytest.raises(Exception, match="no"):
            save(checkpointer, 2, {**frozen, "q": frozen["q"] + 1}, adapters(2))
    third, items = save(checkpointer, 3, frozen, adapters(3))
    assert_whole(third, items)


def _refuse(*args, **options):
    raise OSError(5, "no")


def test_trash_and_verify_see_steps_that_share_files_as_any_others(checkpointer):
    frozen = base()
    for step in (1, 2, 3):
        save(checkpointer, step, frozen, adapters(step))
    run = Run.open(checkpointer.uri)
    delete_step(run, run.step(1), by="test", reason="")
    assert all(verify_step(run, step).ok for step in (2, 3))
