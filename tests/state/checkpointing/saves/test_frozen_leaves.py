"""Leaves of an accelerator that did not change stay on their devices: their files are linked."""

import itertools
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cairn import Checkpointer, Damage, DedupPolicy, Run, SaveError
from cairn.storage.runs.annotate import note_verified
from tests.state.checkpointing.saves.arrays import numbers, put_by_program
from tests.state.seams import (
    Dedup,
    DeferredLeaf,
    DeviceShard,
    Transfers,
    compile_digests,
    has_digest,
    leaf_forms,
    start_digests,
    tree_writer,
)
from tests.storage.states import assert_same, put

LEAF = 64 << 10


def damage_values(checkpointer, item):
    """Cut short the data files of an item of the first step."""
    folder = Path(checkpointer.uri.local_path) / "attempts" / "1" / "1" / item
    files = [file for file in folder.rglob("*") if file.is_file() and "/d/" in str(file)]
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    assert files


class Frozen:
    """A run of one leaf that changes and one that does not, and what is copied of each save."""

    def __init__(self, path, monkeypatch):
        self.copied = []
        self.base = put_by_program(numbers())
        start = Transfers.start

        def started(transfers, parts):
            self.copied += [path for path, _ in parts]
            start(transfers, parts)

        monkeypatch.setattr(Transfers, "start", started)
        self.checkpointer = Checkpointer(path / "run")

    def save(self, step, **options):
        self.copied.clear()
        # Files of their own: of a file of which half has changed nothing is linked.
        trained = {"adapter": put_by_program(numbers(step))}
        items = {"model": {"base": self.base}, "lora": trained}
        return self.checkpointer.save(step, items, **options)

    def check(self, step, base=0):
        found = self.checkpointer.restore(
            {
                "model": {"base": jax.ShapeDtypeStruct(self.base.shape, np.uint32)},
                "lora": {"adapter": jax.ShapeDtypeStruct(self.base.shape, np.uint32)},
            },
            step=step,
        )
        assert_same(
            jax.tree.map(np.asarray, found),
            {"model": {"base": numbers(base)}, "lora": {"adapter": numbers(step)}},
        )


@pytest.fixture
def frozen(tmp_path, accelerator, monkeypatch):
    frozen = Frozen(tmp_path, monkeypatch)
    with frozen.checkpointer:
        frozen.save(1).wait()
        assert sorted(frozen.copied) == ["adapter", "base"]
        yield frozen


def test_the_very_array_of_the_last_step_stays_on_its_device(frozen):
    for step in (2, 3):
        frozen.save(step).wait()
        assert frozen.copied == ["adapter"]
        frozen.check(step)


def test_an_array_in_a_file_of_which_most_is_copied_is_copied_in_the_call(tmp_path, accelerator):
    """Keys are never left on their device, and of a file that is mostly wanted anew nothing is."""
    tree = {
        "small": put_by_program(numbers()[:1]),
        "keys": jax.random.split(jax.random.key(0), 4096),
    }
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": tree}).wait()
        handle = checkpointer.save(2, {"model": tree})
        tree["small"].delete()
        handle.wait()
        found = checkpointer.restore({"model": {"small": numbers()[:1]}}, step=2, only="small")
    assert_same(found["model"], {"small": numbers()[:1]})


def test_an_array_that_was_to_be_linked_is_copied_if_its_file_is_damaged(frozen, writes):
    damage_values(frozen.checkpointer, "model")
    handle = frozen.save(2)
    writes.set()
    handle.wait()
    assert frozen.copied == ["adapter"]
    frozen.check(2)


def test_a_save_fails_if_what_it_was_to_link_is_damaged_and_donated(frozen, monkeypatch):
    damage_values(frozen.checkpointer, "model")
    link = Dedup.reuse
    donated = threading.Event()

    def reused(*args, **options):
        assert donated.wait(60)
        return link(*args, **options)

    monkeypatch.setattr(Dedup, "reuse", reused)
    handle = frozen.save(2)
    frozen.base.delete()
    donated.set()
    with pytest.raises(SaveError, match="values that were to be linked are gone"):
        handle.wait()
    assert frozen.checkpointer.steps() == [1]
    frozen.base = put_by_program(numbers())
    frozen.save(3).wait()
    assert sorted(frozen.copied) == ["adapter", "base"]
    frozen.check(3)


def test_what_is_compressed_otherwise_than_before_is_copied_in_the_call(frozen):
    handle = frozen.save(2, compression="zstd")
    frozen.base.delete()
    handle.wait()
    assert sorted(frozen.copied) == ["adapter", "base"]
    frozen.check(2)


def test_a_file_that_was_shared_for_long_enough_is_copied_in_the_call(frozen):
    frozen.checkpointer._dedup_policy = DedupPolicy(max_steps=1)
    handle = frozen.save(2)
    assert sorted(frozen.copied) == ["adapter", "base"]
    handle.wait()
    frozen.check(2)


@pytest.mark.parametrize("dtype", ["int4", "uint2"])
@pytest.mark.parametrize("spec", [None, ("fsdp", None)])
def test_the_stored_form_of_a_frozen_leaf_is_computed_only_once(tmp_path, monkeypatch, dtype, spec):
    """Such as the codes of a quantized base; or again, if its file is damaged."""
    computed = []
    carried = leaf_forms._carried
    monkeypatch.setattr(
        leaf_forms, "_carried", lambda *args: (computed.append(args[1].kind), carried(*args))[1]
    )
    host = np.arange(64 * 256).reshape(64, 256) % 4
    base = jnp.asarray(host, dtype)
    tree = {"codes": base if spec is None else put(base, *spec)}
    other = put_by_program(numbers())
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": tree, "other": {"w": other}}).wait()
            assert len(computed) == 1
        known = Run.open(checkpointer.uri)
        assert known.contents(known.step(2)).shared_files
        damage_values(checkpointer, "model")
        checkpointer.save(3, {"model": tree, "other": {"w": other}}).wait()
        assert len(computed) > 1
        found = checkpointer.restore({"model": tree}, step=3)["model"]["codes"]
        assert found.dtype == base.dtype
        assert_same({"codes": np.asarray(found)}, {"codes": np.asarray(base)})


@pytest.mark.parametrize(("limit", "together"), [(3 * LEAF, 3), (LEAF // 2, 1), (None, 4)])
def test_of_leaves_that_can_not_be_linked_few_are_copied_at_a_time(
    tmp_path, accelerator, monkeypatch, limit, together
):
    tree = {f"w{n}": put_by_program(numbers(n)) for n in range(4)}
    copied, written = [], []
    copy, write = DeferredLeaf.copy, tree_writer.write_data_files

    def parts(leaf):
        copied.append(leaf.leaf.nbytes)
        return copy(leaf)

    def written_at_once(sink, shards):
        written.append(len(copied))
        copied.clear()
        return write(sink, shards)

    monkeypatch.setattr(DeferredLeaf, "copy", parts)
    with Checkpointer(tmp_path / "run", host_memory=limit) as checkpointer:
        checkpointer.save(1, {"model": tree}).wait()
        damage_values(checkpointer, "model")
        monkeypatch.setattr(tree_writer, "write_data_files", written_at_once)
        checkpointer.save(2, {"model": tree}).wait()
        found = checkpointer.restore({"model": tree}, step=2)["model"]
    assert max(written) == together
    assert sum(written) == len(tree)
    assert_same(jax.tree.map(np.asarray, found), {f"w{n}": numbers(n) for n in range(4)})


def programs_are_there():
    for thread in threading.enumerate():
        if thread.name == "cairn-digests":
            thread.join(60)


@pytest.fixture
def given_back(frozen):
    """A frozen base that each step is given, and gives back; its digest is known."""
    step = jax.jit(lambda leaf: leaf, donate_argnums=0)

    def save(number, **options):
        handle = frozen.save(number, **options)
        frozen.base = step(frozen.base)
        handle.wait()
        programs_are_there()

    frozen.base = step(frozen.base)
    for number in (2, 3):
        save(number)
    frozen.given_back = save
    return frozen


def test_a_base_that_steps_give_back_stays_on_its_device(given_back):
    for number in (4, 5):
        given_back.given_back(number)
        assert given_back.copied == ["adapter"]
        given_back.check(number)


def test_a_base_that_changes_after_all_is_copied(given_back):
    given_back.given_back(4)
    given_back.base = put_by_program(numbers(77))
    given_back.given_back(5)
    assert sorted(given_back.copied) == ["adapter", "base"]
    given_back.check(5, base=77)
    given_back.check(4)
    given_back.base = put_by_program(numbers())
    given_back.given_back(6)
    given_back.check(6)


def test_a_base_is_copied_in_the_call_once_its_file_is_known_to_be_damaged(given_back):
    run = Run.open(given_back.checkpointer.uri)
    note_verified(run, run.step(3), damage=Damage(at="2026-01-02T03:04:05Z"))
    given_back.given_back(4)
    assert sorted(given_back.copied) == ["adapter", "base"]
    given_back.check(4)


def digests(*arrays):
    """Of a leaf of these arrays, each on a device."""
    places = [
        DeviceShard(*array.devices(), array.shape, np.dtype(array.dtype).name) for array in arrays
    ]
    compile_digests({"w": places})
    programs_are_there()
    return start_digests({"w": arrays}, {"w": places}).values()


def digest(*arrays):
    return digests(*arrays)["w"]


WORDS = ["uint8", "int8", "int32", "uint32", "float32", "bfloat16", "float16", "float8_e5m2"]


@pytest.mark.parametrize("dtype", [*WORDS, "int4", "uint4", "bool"])
def test_each_change_of_one_element_changes_the_digest(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    host = np.zeros((3, 5), np.uint8).astype(kind)
    seen = {digest(jnp.asarray(host))}
    for place in np.ndindex(host.shape):
        changed = host.copy()
        changed[place] = np.array(1).astype(kind)
        seen.add(digest(jnp.asarray(changed)))
    assert len(seen) == 1 + host.size
    assert digest(jnp.asarray(host.copy())) in seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_digests_tell_all_bits_apart(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.dtype(f"u{kind.itemsize}")
    exponent = np.array(np.inf, kind).view(bits).item()
    odd = [0, 1 << 8 * kind.itemsize - 1, exponent, exponent + 1, exponent + 2, 1]
    arrays = [np.array([one], bits).view(kind) for one in odd]
    assert len({digest(jnp.asarray(one)) for one in arrays}) == len(odd)


def test_what_trades_places_changes_the_digest():
    hosts = [np.array(one, np.float32) for one in itertools.permutations([1.0, -1.0, 0.0, -0.0])]
    assert len({digest(jnp.asarray(host.reshape(2, 2))) for host in hosts}) == len(hosts)
    rows = put(numbers(), "fsdp", None)
    parts = [shard.data for shard in rows.addressable_shards][:2]
    assert digest(*parts) != digest(*parts[::-1])


def test_complex_numbers_have_no_digest():
    assert not has_digest(np.dtype(np.complex64))
    assert all(has_digest(np.dtype(getattr(ml_dtypes, name, name))) for name in WORDS)
