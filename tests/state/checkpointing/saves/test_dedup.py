"""Leaves that stay as they are between saves are linked, and every step stays whole by itself."""

import itertools
import math
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from prometheus_client import REGISTRY

from cairn import (
    Checkpointer,
    DedupPolicy,
    ObjectStore,
    PolicyError,
    Run,
    delete_step,
    fork_run,
    open_files,
    parse_uri,
    verify_step,
)
from cairn.state.checkpointing.restore import restore_item
from cairn.storage.arrays.four_bits import packing_axis
from cairn.storage.runs.annotate import note_verified
from tests.faults.report import is_long
from tests.state.seams import dedup, packed_shape, unpack
from tests.storage.arrays.test_fingerprints import cancelling_sign_changes, with_signs_changed
from tests.storage.states import abstract, assert_same, floats, put
from tests.stores import BUCKETS, STORES, WITHOUT_S3

KIB = 1024


@pytest.fixture
def checkpointer(some_root_uri):
    with Checkpointer(some_root_uri / "run", writer_id="job") as made:
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
    """The step is read bit for bit."""
    for name, tree in items.items():
        assert_same(restore_item(handle.uri, name, abstract(tree)), tree)


@pytest.mark.parametrize("some_root_uri", WITHOUT_S3, indirect=True)  # plain Orbax reads it
def test_a_frozen_base_is_not_written_again(checkpointer, some_root_uri):
    frozen = base()
    first, items = save(checkpointer, 1, frozen, adapters(1))
    assert_whole(first, items)
    second, items = save(checkpointer, 2, frozen, adapters(2))
    assert_whole(second, items)
    for name, tree in items.items():  # plain Orbax reads what is linked too
        assert_same(
            ocp.load(second.uri.orbax_path(), abstract(tree), checkpointable_name=name), tree
        )
    if some_root_uri.scheme == "file":
        frozen_bytes = sum(leaf.nbytes for leaf in frozen.values())
        assert written_bytes(first.uri, links=2) > frozen_bytes
        assert written_bytes(second.uri) < 64 * KIB < frozen_bytes


@pytest.mark.parametrize("some_root_uri", STORES if is_long() else ["file"], indirect=True)
def test_equal_values_in_new_arrays_are_recognised(checkpointer, some_root_uri):
    """A jitted step that passes the base through gives arrays of its own."""
    frozen = base()
    save(checkpointer, 1, frozen, adapters(1))
    passed = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(frozen)
    second, items = save(checkpointer, 2, passed, adapters(2))
    assert_whole(second, items)
    if some_root_uri.scheme == "file":
        assert written_bytes(second.uri) < 64 * KIB


def test_one_changed_element_of_a_leaf_is_stored(checkpointer):
    frozen = base()
    save(checkpointer, 1, frozen, adapters(1))
    for step, where in enumerate([0, 77_777 % (256 * 256), 256 * 256 - 1], 2):
        changed = frozen["k"].at[where // 256, where % 256].add(1e-3)
        changed = jax.device_put(changed, frozen["k"].sharding)
        handle, items = save(checkpointer, step, {**frozen, "k": changed}, adapters(step))
        assert_whole(handle, items)


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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("int4", (8, 16)), ("uint8", (8, 8))),
        (("uint8", (8, 8)), ("int4", (8, 16))),
        (("uint4", (8, 16)), ("float8_e4m3", (8, 8))),
        (("int4", (8, 3)), ("int4", (4, 6))),
    ],
)
def test_a_leaf_whose_stored_bytes_are_those_of_another_is_stored_as_it_is(
    checkpointer, before, after
):
    """Packed along another axis, or not packed: the same bytes are other elements."""

    def placed(kind):
        dtype, shape = kind
        octets = np.arange(7, 7 + 64, dtype=np.uint8)
        if dtype in ("int4", "uint4"):
            axis = packing_axis(shape)
            stored = packed_shape(shape, axis)
            host = unpack(octets[: math.prod(stored)].reshape(stored), dtype, axis)
        else:
            host = octets.view(jnp.dtype(dtype)).reshape(shape)
        return {"w": put(host)}

    trained = adapters(1)
    save(checkpointer, 1, placed(before), trained)
    second, items = save(checkpointer, 2, placed(after), trained)
    assert verify_step(Run(checkpointer.uri), 2).problems == ()
    for name, tree in items.items():
        assert_same(restore_item(second.uri, name, abstract(tree)), tree)


def test_numpy_arrays_that_their_owner_changed_are_stored(checkpointer):
    host = {"table": floats(256, 256)}
    first, _ = save(checkpointer, 1, host, adapters(1))
    before = {"table": host["table"].copy()}
    host["table"][3, 5] += 1
    second, items = save(checkpointer, 2, host, adapters(2))
    assert_whole(second, items)
    found = restore_item(first.uri, "model", abstract({"base": before, "lora": adapters(1)}))
    assert_same(found["base"], before)


@pytest.mark.parametrize("some_root_uri", STORES, indirect=True)
def test_a_step_is_whole_after_the_one_whose_files_it_links_is_deleted(checkpointer, some_root_uri):
    frozen = base()
    first, _ = save(checkpointer, 1, frozen, adapters(1))
    second, items = save(checkpointer, 2, frozen, adapters(2))
    if some_root_uri.scheme == "file":
        shutil.rmtree(first.uri.local_path)
    else:
        checkpointer._run.objects.delete_prefix("attempts/1/1/")
    assert_whole(second, items)
    run = Run.open(checkpointer.uri)
    assert verify_step(run, 2).ok
    third, items = save(checkpointer, 3, frozen, adapters(3))
    assert_whole(third, items)


def test_files_of_a_step_that_is_gone_are_written_again(checkpointer, some_root_uri):
    frozen = base()
    first, _ = save(checkpointer, 1, frozen, adapters(1))
    if some_root_uri.scheme == "file":
        shutil.rmtree(first.uri.local_path)
    else:
        checkpointer._run.objects.delete_prefix("attempts/1/1/")
    second, items = save(checkpointer, 2, frozen, adapters(2))
    assert_whole(second, items)
    assert verify_step(Run.open(checkpointer.uri), 2).ok


def data_file(uri):
    """The largest data file of a step."""
    return max(open_files(uri).walk(), key=lambda entry: entry.size).name


def cut_short(data):
    return data[: len(data) // 2]


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]


def damage(uri, name, how, *, quietly=False):
    """Change a stored file in place; quietly: as a disk does, which tells no time of it."""
    if uri.scheme != "file":
        objects = ObjectStore.open(uri)
        objects.write(name, how(objects.read(name).value))
        return
    path = os.path.join(uri.local_path, name)
    before = os.stat(path)
    with open(path, "r+b") as file:
        data = how(file.read())
        file.seek(0)
        file.write(data)
        file.truncate()
    if quietly:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGED = [*itertools.product(("file", *BUCKETS), ("the same", "new"), (flipped, cut_short))]
SOME_DAMAGED = [
    ("file", "the same", flipped),
    ("gcs", "new", cut_short),
    ("s3", "the same", cut_short),
]


@pytest.mark.parametrize(
    ("some_root_uri", "arrays", "how"),
    DAMAGED if is_long() else SOME_DAMAGED,
    indirect=["some_root_uri"],
)
def test_values_of_a_damaged_file_are_written_anew_by_the_next_save(
    checkpointer, some_root_uri, how, arrays, caplog
):
    frozen = base()
    save(checkpointer, 1, frozen, adapters(1))
    second, _ = save(checkpointer, 2, frozen, adapters(2))
    name = data_file(second.uri)
    damage(second.uri, name, how)
    caplog.clear()
    run = Run.open(checkpointer.uri)
    for step in (3, 4):
        given = frozen if arrays == "the same" else jax.tree.map(jnp.copy, frozen)
        handle, items = save(checkpointer, step, given, adapters(step))
        assert_whole(handle, items)
        assert verify_step(run, step).ok
    assert name not in {record.name for record in run.contents(run.step(3)).objects}
    assert run.contents(run.step(4)).shared_files[0].step == 3
    (warning,) = [one.getMessage() for one in caplog.records if "damaged" in one.getMessage()]
    assert str(second.uri / name) in warning
    assert not verify_step(run, 2).ok
    assert verify_step(run, 1).ok == (some_root_uri.scheme != "file")  # a copy is another file


def test_a_file_that_is_gone_is_written_anew_by_the_next_save(checkpointer):
    frozen = base()
    first, _ = save(checkpointer, 1, frozen, adapters(1))
    open_files(first.uri).delete_tree(data_file(first.uri))
    run = Run.open(checkpointer.uri)
    for step in (2, 3):
        handle, items = save(checkpointer, step, frozen, adapters(step))
        assert_whole(handle, items)
        assert verify_step(run, step).ok


def test_a_file_that_was_not_read_for_long_is_read_before_it_is_shared(tmp_path):
    """A disk that loses a bit says nothing of it."""
    now = [datetime(2026, 1, 1, tzinfo=UTC)]
    dedup = DedupPolicy(verify_hours=2)
    frozen = base()
    with Checkpointer(tmp_path / "run", writer_id="job", clock=lambda: now[0], dedup=dedup) as made:
        first, _ = save(made, 1, frozen, adapters(1))
        name = data_file(first.uri)
        before = counted("cairn_save_verified_bytes_total")
        now[0] += timedelta(hours=1)
        save(made, 2, frozen, adapters(2))
        assert counted("cairn_save_verified_bytes_total") == before
        now[0] += timedelta(hours=1)
        save(made, 3, frozen, adapters(3))
        read = counted("cairn_save_verified_bytes_total") - before
        assert read >= sum(leaf.nbytes for leaf in frozen.values())
        damage(first.uri, name, flipped, quietly=True)
        now[0] += timedelta(hours=1)  # since it was read
        third, _ = save(made, 4, frozen, adapters(4))
        assert os.path.samefile(
            os.path.join(first.uri.local_path, name), os.path.join(third.uri.local_path, name)
        )
        now[0] += timedelta(hours=1)
        last, items = save(made, 5, frozen, adapters(5))
        assert_whole(last, items)
        assert verify_step(Run.open(made.uri), 5).ok
        assert not os.path.exists(os.path.join(last.uri.local_path, name))


def counted(metric):
    return REGISTRY.get_sample_value(metric) or 0.0


def test_a_file_that_took_the_name_size_and_time_of_a_linked_one_is_not_passed_on(tmp_path):
    """As a backup that was restored in between, or a tool that copies with times."""
    frozen = base()
    with Checkpointer(tmp_path / "run", writer_id="job") as made:
        first, _ = save(made, 1, frozen, adapters(1))
        path = Path(first.uri.local_path, data_file(first.uri))
        shutil.copy2(path, tmp_path / "other")
        damage(parse_uri(tmp_path), "other", flipped, quietly=True)
        os.replace(tmp_path / "other", path)
        for step in (2, 3):
            handle, items = save(made, step, frozen, adapters(step))
            assert_whole(handle, items)
            assert verify_step(Run.open(made.uri), step).ok


@pytest.mark.parametrize("noted", [1, 3])
def test_nothing_is_linked_of_steps_that_share_a_file_with_one_that_is_known_damaged(
    tmp_path, noted
):
    """What happened to the file shows neither in its size nor in its times."""
    frozen, run = base(), Run(parse_uri(tmp_path / "run"))
    with Checkpointer(run.uri) as checkpointer:
        for step in (1, 2, 3):
            handle, _ = save(checkpointer, step, frozen, adapters(step))
        damage(handle.uri, data_file(handle.uri), flipped, quietly=True)
        report = verify_step(run, noted)
        note_verified(run, run.step(noted), damage=report.damage(at=datetime.now(UTC)))
        fourth, items = save(checkpointer, 4, frozen, adapters(4))
        assert_whole(fourth, items)
        assert verify_step(run, 4).ok
        save(checkpointer, 5, frozen, adapters(5))
    assert verify_step(run, 5).ok
    links = [one.stat().st_nlink for one in Path(fourth.uri.local_path).rglob("*") if one.is_file()]
    assert {2} < {*links} <= {1, 2}  # shared on from there


def test_a_file_that_was_only_touched_is_shared_on(tmp_path):
    frozen = base()
    with Checkpointer(tmp_path / "run", writer_id="job") as made:
        first, _ = save(made, 1, frozen, adapters(1))
        os.utime(os.path.join(first.uri.local_path, data_file(first.uri)))
        for step in (2, 3):
            handle, items = save(made, step, frozen, adapters(step))
            assert_whole(handle, items)
            assert written_bytes(handle.uri) < 64 * KIB


def base_origins(run, steps):
    """By step: the step that wrote the base it has."""
    found = []
    for step in steps:
        shared = run.contents(run.step(step)).shared_files
        assert len(shared) <= 1
        found.append(shared[0].step if shared else step)
    return found


@pytest.mark.parametrize("arrays", ["the same", "new"])
def test_values_are_written_anew_once_many_steps_share_them(some_root_uri, arrays):
    frozen = base()
    dedup = DedupPolicy(max_steps=3)
    with Checkpointer(some_root_uri / "run", writer_id="job", dedup=dedup) as made:
        for step in range(1, 6):
            given = frozen if arrays == "the same" else jax.tree.map(jnp.copy, frozen)
            handle, items = save(made, step, given, adapters(step))
        assert_whole(handle, items)
        assert base_origins(Run.open(made.uri), range(1, 6)) == [1, 1, 1, 4, 4]


def test_values_are_written_anew_once_they_are_old(tmp_path):
    frozen = base()
    now = [datetime(2026, 1, 1, tzinfo=UTC)]
    dedup = DedupPolicy(max_steps=None, max_hours=5)
    with Checkpointer(tmp_path / "run", writer_id="job", clock=lambda: now[0], dedup=dedup) as made:
        for step in range(1, 6):
            save(made, step, frozen, adapters(step))
            now[0] += timedelta(hours=2)
        assert base_origins(Run.open(made.uri), range(1, 6)) == [1, 1, 1, 4, 4]


def test_by_default_no_file_is_shared_for_ever():
    policy = DedupPolicy()
    start = datetime(2026, 1, 1, tzinfo=UTC)
    assert policy.may_link(steps=1, written=start, now=start)
    assert not policy.may_link(steps=1000, written=start, now=start)
    assert not policy.may_link(steps=1, written=start, now=start + timedelta(days=7))
    assert policy.must_verify(seen=start, now=start + timedelta(days=1))


def test_a_sharing_policy_that_can_not_act_is_refused(tmp_path):
    with pytest.raises(PolicyError) as raised:
        DedupPolicy(max_steps=0, max_hours=-1, verify_hours=None)
    for name in ("max_steps is 0", "max_hours is -1", "verify_hours is None"):
        assert name in str(raised.value)
    with pytest.raises(PolicyError, match="dedup: expected a DedupPolicy, found int 3"):
        Checkpointer(tmp_path / "run", dedup=3)


def test_the_run_of_a_process_takes_another_policy_from_then_on(tmp_path):
    frozen = base()
    made = Checkpointer.for_run(tmp_path / "run")
    with made:
        save(made, 1, frozen, adapters(1))
        save(made, 2, frozen, adapters(2))
        assert Checkpointer.for_run(made.uri, dedup=DedupPolicy(max_steps=1)) is made
        for step in (3, 4):
            save(made, step, frozen, adapters(step))
        assert base_origins(Run.open(made.uri), range(1, 5)) == [1, 1, 3, 4]


@pytest.mark.parametrize("some_root_uri", STORES, indirect=True)
def test_a_step_tells_which_files_it_shares_with_which_step(checkpointer, some_root_uri):
    frozen = base()
    first, _ = save(checkpointer, 1, frozen, adapters(1))
    second, _ = save(checkpointer, 2, frozen, adapters(2))
    run = Run.open(checkpointer.uri)
    assert run.contents(run.step(1)).shared_files == ()
    (shared,) = run.contents(run.step(2)).shared_files
    assert (shared.step, shared.attempt) == (1, first.attempt)
    sizes = {record.name: record for record in run.contents(run.step(2)).objects}
    assert sum(sizes[name].size for name in shared.files) > sum(
        leaf.nbytes for leaf in frozen.values()
    )
    if some_root_uri.scheme == "file":
        for entry in open_files(second.uri).walk():
            found = os.stat(os.path.join(second.uri.local_path, entry.name))
            assert (found.st_nlink > 1) == (entry.name in shared.files)
    first_environment, environment = (run.manifest(run.step(n)).environment for n in (1, 2))
    assert environment == first_environment  # which older manifests had it in


def test_a_fork_copies_and_says_that_it_shares_nothing(checkpointer, some_root_uri):
    frozen = base()
    for step in (1, 2):
        save(checkpointer, step, frozen, adapters(step))
    run = Run.open(checkpointer.uri)
    assert run.contents(run.step(2)).shared_files
    forked = fork_run(run, run.step(2), some_root_uri / "forked", by="test")
    copy = Run.open(some_root_uri / "forked")
    assert copy.contents(forked).shared_files == ()
    assert (
        copy.manifest(forked).environment["packages"]
        == run.manifest(run.step(2)).environment["packages"]
    )


def test_changes_that_leave_the_digest_as_it_is_are_stored(checkpointer):
    """Two changes of sign may cancel in a sum that is linear in the elements, as digests are."""
    table = floats(1024, 1024)
    pair = cancelling_sign_changes(table)[0]
    first = checkpointer.save(1, {"model": {"table": table.copy()}}, meta={})
    first.wait()
    changed = with_signs_changed(table, pair)
    second = checkpointer.save(2, {"model": {"table": changed}}, meta={})
    second.wait()
    run = Run.open(checkpointer.uri)
    before, after = (run.contents(run.step(step)).leaves[0] for step in (1, 2))
    assert before.chunks == table.shape
    assert before.digest == after.digest
    assert_same(restore_item(second.uri, "model", {"table": table}), {"table": changed})
    assert_same(restore_item(first.uri, "model", {"table": table}), {"table": table})


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
    assert 0 < dedup._LEAST_LIVE <= 1


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
