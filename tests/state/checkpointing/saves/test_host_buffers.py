"""Saves that copy into memory that they keep: right whatever happens next, bounded, used again."""

import gc
import os
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn import Checkpointer, PolicyError, Run, SaveError
from cairn.state.checkpointing.restore import restore_item
from tests.state.seams import HostBuffers, host_buffers, places, tree_writer
from tests.storage.states import assert_same, floats, mesh, put, raw

LARGE = (256, 512)
"""Of float32: 512 KiB, and 64 KiB on each of eight devices."""


@pytest.fixture
def checkpointer(some_root_uri):
    with Checkpointer(some_root_uri / "run", writer_id="job", reuse_buffers=True) as made:
        yield made


@pytest.fixture
def writes(monkeypatch):
    """Nothing is written until `set` is called: the arrays are only held."""
    allowed = threading.Event()
    open_data_file_writer = tree_writer.open_data_file_writer

    def waiting(folder, **options):
        assert allowed.wait(60)
        return open_data_file_writer(folder, **options)

    monkeypatch.setattr(tree_writer, "open_data_file_writer", waiting)
    yield allowed
    allowed.set()


@jax.jit
def made(leaf):
    """A leaf in memory of JAX's own: what was put may lie in NumPy's."""
    return leaf * jnp.uint32(3)


step = jax.jit(lambda leaf: leaf + jnp.uint32(1), donate_argnums=0)


def numbers(seed=0, shape=LARGE):
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


def spread(host):
    """The same numbers, placed in every way that a training job places them."""
    placed = {
        "rows": put(host, "fsdp", None),
        "columns": put(host, None, "fsdp"),
        "partly": put(host, "dp", None),
        "replicated": put(host),
        "uncommitted": jnp.array(host),
        "elsewhere": jax.device_put(host, jax.devices()[3]),
    }
    return jax.block_until_ready(jax.tree.map(made, placed))


def addresses(leaf):
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


def stored(handle, like):
    return restore_item(handle.uri, "model", jax.tree.map(lambda leaf: np.zeros_like(leaf), like))


# Places


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30))
def test_places_do_not_overlap_and_waste_less_than_a_line_each(sizes):
    offsets, nbytes = places(sizes)
    ends = [start + size for start, size in zip(offsets, sizes, strict=True)]
    assert all(start % 64 == 0 for start in offsets)
    assert all(end <= after for end, after in zip(ends, [*offsets[1:], nbytes], strict=True))
    assert sum(sizes) <= nbytes < sum(sizes) + 64 * len(sizes)


# The memory alone


def test_copies_have_the_bits_shapes_and_dtypes_of_what_was_given():
    host = floats(48, 40)
    given = [
        host,
        host.T,
        host[::3, ::-2],
        host.astype(ml_dtypes.bfloat16).T,
        host.astype(">f8"),
        (host > 0)[:, 1:],
        np.float32(3).reshape(()),
        host.astype(np.complex128)[1:, ::2],
        host.astype(ml_dtypes.float8_e4m3fn),
    ]
    found = HostBuffers().copies(given)
    assert [raw(one) for one in found] == [raw(one) for one in given]
    assert all(one.flags.c_contiguous and not one.flags.writeable for one in found)


def test_large_arrays_are_copied_in_pieces_by_several_threads(monkeypatch):
    monkeypatch.setattr(host_buffers, "_BATCH_BYTES", 1000)
    monkeypatch.setattr(host_buffers, "_THREADS", 4)
    given = [floats(size, 7, seed=size) for size in (1, 40, 999, 3)] + [floats(60, 50).T]
    assert [raw(one) for one in HostBuffers().copies(given)] == [raw(one) for one in given]


def test_memory_is_used_again_grows_to_what_is_needed_and_is_freed():
    buffers = HostBuffers()
    assert buffers.nbytes == 0

    def place_of(*sizes):
        (first, *_) = buffers.copies([np.ones(size, np.uint8) for size in sizes])
        return first.ctypes.data

    first = place_of(1 << 20, 1 << 20)
    assert buffers.nbytes == 2 << 20
    assert place_of(1 << 20) == first, "a smaller save lies where the larger one lay"
    assert buffers.nbytes == 2 << 20
    place_of(3 << 20)
    assert buffers.nbytes == 3 << 20
    buffers.forget()
    assert buffers.nbytes == 0


def test_what_somebody_still_reads_is_not_overwritten_and_is_counted_until_then():
    buffers = HostBuffers(limit=2 << 20)
    (first,) = buffers.copies([np.full(1 << 20, 1, np.uint8)])
    (second,) = buffers.copies([np.full(1 << 20, 2, np.uint8)])
    assert buffers.nbytes == 2 << 20
    assert (first == 1).all()
    assert (second == 2).all()
    with pytest.raises(PolicyError, match="2097152 that an earlier save still reads"):
        buffers.copies([np.full(1 << 20, 3, np.uint8)])
    part = first[5:10].data
    del first, second
    assert buffers.nbytes == 1 << 20, "a part of it is enough to keep it"
    assert bytes(part) == b"\1" * 5
    del part
    assert buffers.nbytes == 0


def test_a_forked_child_keeps_none_of_it():
    """Nor unmaps what its parent's save was reading: other memory of its own may lie there."""
    free, read = HostBuffers(), HostBuffers()
    free.copies([np.ones(1 << 20, np.uint8)])
    (copy,) = read.copies([np.ones(1 << 21, np.uint8)])
    child = os.fork()
    if child == 0:
        del copy
        (never_unmapped,) = host_buffers._of_the_parent
        os._exit(0 if (free.nbytes, never_unmapped.nbytes) == (0, 1 << 21) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (free.nbytes, read.nbytes) == (1 << 20, 1 << 21)
    assert (copy == 1).all()


# Saves


def test_what_is_saved_is_what_the_arrays_held_whatever_happens_right_after(checkpointer, writes):
    """Donated, deleted and overwritten, while nothing is written yet; save after save."""
    handles = {}
    for number in (1, 2, 3):
        host = numbers(number)
        tree = {**spread(host), "numpy": host.copy(), "small": np.array([number])}
        gone = put(host + np.uint32(7), "fsdp", None)
        writes.clear()
        handles[number] = checkpointer.save(number, {"model": {**tree, "gone": gone}}, meta={})
        tree["numpy"][...] = 0
        tree["small"][...] = 0
        gone.delete()
        for leaf in tree.values():
            if isinstance(leaf, jax.Array):
                jax.block_until_ready(step(leaf))
        assert not handles[number].done
        writes.set()
        handles[number].wait()
    for number, handle in handles.items():
        host = numbers(number)
        expected = {name: host * np.uint32(3) for name in spread(host)}
        expected |= {"numpy": host, "small": np.array([number]), "gone": host + np.uint32(7)}
        assert_same(stored(handle, expected), expected)


def test_a_step_is_given_the_memory_that_it_donates_while_the_save_is_still_to_be_written(
    checkpointer, writes
):
    leaves = spread(numbers())
    before = {name: addresses(leaf) for name, leaf in leaves.items()}
    handle = checkpointer.save(1, {"model": leaves}, meta={})
    after = {name: addresses(jax.block_until_ready(step(leaf))) for name, leaf in leaves.items()}
    assert not handle.done
    assert after == before, "nothing is held, so that XLA copies nothing"
    writes.set()
    handle.wait()


def test_twenty_saves_take_the_memory_of_one(checkpointer, monkeypatch):
    mapped, asked = host_buffers._mapped, []
    monkeypatch.setattr(
        host_buffers, "_mapped", lambda nbytes: asked.append(nbytes) or mapped(nbytes)
    )
    tree = spread(numbers())
    held = set()
    for number in range(20):
        handle = checkpointer.save(number, {"model": tree}, meta={})
        tree = jax.tree.map(step, tree)  # while that save is under way: the next one waits for it
        held.add(checkpointer.buffer_bytes)
    handle.wait()
    nbytes = sum(leaf.nbytes for leaf in tree.values())
    assert asked == [nbytes], "mapped once"
    assert held == {nbytes}
    checkpointer.close()
    assert checkpointer.buffer_bytes == 0


def test_arrays_of_other_shapes_and_shardings_are_kept_too(checkpointer):
    trees = [
        {"a": put(numbers(1), "fsdp", None)},
        {"a": put(numbers(1), None, "fsdp"), "b": put(numbers(2, (512, 1024)), "dp", None)},
        {"a": put(numbers(3, (64, 512)), "fsdp", None, on=mesh(4)), "b": numbers(4)},
    ]
    needed = [sum(leaf.nbytes for leaf in tree.values()) for tree in trees]
    for number, tree in enumerate(trees):
        handle = checkpointer.save(number, {"model": tree}, meta={})
        handle.wait()
        assert checkpointer.buffer_bytes == max(needed[: number + 1])
        host = jax.tree.map(np.asarray, tree)
        assert_same(stored(handle, host), host)


def test_after_a_save_that_failed_the_memory_is_used_again(checkpointer, monkeypatch):
    write = tree_writer.write_data_files
    calls = []

    def fails(sink, shards):
        if not calls:
            calls.append(list(shards))
            raise OSError(5, "the disk failed")
        return write(sink, shards)

    monkeypatch.setattr(tree_writer, "write_data_files", fails)
    tree = spread(numbers())
    with pytest.raises(SaveError, match="the disk failed"):
        checkpointer.save(1, {"model": tree}, meta={}).wait()
    held = checkpointer.buffer_bytes
    calls[:] = [None]
    gc.collect()
    handle = checkpointer.save(2, {"model": tree}, meta={})
    assert checkpointer.buffer_bytes == held == sum(leaf.nbytes for leaf in tree.values())
    handle.wait()
    host = jax.tree.map(np.asarray, tree)
    assert_same(stored(handle, host), host)


def test_of_what_the_last_step_stored_and_of_small_arrays_views_are_held(checkpointer):
    """A frozen base is neither copied nor written again."""
    base = spread(numbers())
    tree = {"base": base, "adapter": jnp.ones((64, 64)), "trained": made(put(numbers(1), "fsdp"))}
    checkpointer.save(1, {"model": tree}, meta={}).wait()
    whole = checkpointer.buffer_bytes
    assert whole == sum(leaf.nbytes for leaf in (*base.values(), tree["trained"]))
    checkpointer._buffers.forget()
    handle = checkpointer.save(2, {"model": {**tree, "trained": step(tree["trained"])}}, meta={})
    assert checkpointer.buffer_bytes == tree["trained"].nbytes
    handle.wait()
    run = Run.open(checkpointer.uri)
    assert run.contents(run.step(2)).shared_files


def test_a_state_that_does_not_fit_is_refused_before_anything_is_written(some_root_uri):
    tree = {"a": put(numbers(), "fsdp", None), "b": numbers(1)}
    nbytes = sum(leaf.nbytes for leaf in tree.values())
    limit = nbytes - 1
    with Checkpointer(
        some_root_uri / "run", writer_id="job", reuse_buffers=True, host_memory=limit
    ) as checkpointer:
        with pytest.raises(
            PolicyError, match=rf"at most {limit} bytes in this process, found {nbytes} bytes"
        ):
            checkpointer.save(1, {"model": tree}, meta={})
        assert checkpointer.buffer_bytes == 0
        assert checkpointer.steps() == []
        checkpointer.save(1, {"model": {"b": tree["b"]}}, meta={}).wait()
        assert checkpointer.buffer_bytes == tree["b"].nbytes


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"reuse_buffers": "yes"}, "reuse_buffers is 'yes'"),
        ({"reuse_buffers": True, "host_memory": 0}, "host_memory is 0"),
        ({"reuse_buffers": True, "host_memory": "8 GiB"}, "host_memory is '8 GiB'"),
        ({"reuse_buffers": True, "host_memory": True}, "host_memory is True"),
        ({"host_memory": -1}, "host_memory is -1"),
    ],
)
def test_options_that_can_not_act_are_refused(tmp_path, options, found):
    with pytest.raises(PolicyError) as raised:
        Checkpointer(tmp_path / "run", **options)
    assert found in str(raised.value)


def test_the_run_of_a_process_begins_and_ends_to_keep_buffers(tmp_path):
    tree = {"a": numbers()}
    with Checkpointer.for_run(tmp_path / "run") as made_first:
        made_first.save(1, tree, meta={}).wait()
        assert made_first.buffer_bytes == 0
        assert Checkpointer.for_run(made_first.uri, reuse_buffers=True) is made_first
        made_first.save(2, tree, meta={}).wait()
        assert made_first.buffer_bytes == tree["a"].nbytes
        Checkpointer.for_run(made_first.uri, reuse_buffers=True, host_memory=1000)
        with pytest.raises(PolicyError, match="at most 1000 bytes"):
            made_first.save(3, tree, meta={})
        Checkpointer.for_run(made_first.uri)
        assert made_first.buffer_bytes == tree["a"].nbytes
        Checkpointer.for_run(made_first.uri, reuse_buffers=False)
        assert made_first.buffer_bytes == 0
        made_first.save(3, tree, meta={}).wait()
        assert made_first.buffer_bytes == 0
