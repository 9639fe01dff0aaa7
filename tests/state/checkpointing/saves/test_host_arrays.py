"""What is saved is what the arrays held when `save` was called, whatever happens to them then."""

import dataclasses
import functools
import gc
import math
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from cairn import Checkpointer, Run, UnsupportedLeafError
from cairn.state.checkpointing.restore import restore_item
from tests.state.seams import (
    Transfers,
    host_arrays,
    host_trees,
    host_views,
    save_job,
    tree_writer,
    viewed,
)
from tests.state.seams import checkpointer as checkpointer_module
from tests.state.seams import chunks as chunk_shape
from tests.storage.states import assert_same, floats, mesh, put, raw


def hold(leaf):
    """The leaf, held as the only one of its item."""
    return Transfers("model", {"w": leaf}).wait()["w"]


def put_together(array):
    """A host array, and how often each of its elements is written."""
    whole, count = np.empty(array.shape, array.dtype), np.zeros(array.shape, int)
    for part in array.boxes:
        box = tuple(
            slice(at, at + size) for at, size in zip(part.origin, part.values.shape, strict=True)
        )
        whole[box], count[box] = part.values, count[box] + 1
    return whole, count


def assert_held(array, expected):
    """Each element once, and cut so that the parts are whole shards and these whole chunks."""
    expected = np.asarray(expected)
    whole, count = put_together(array)
    assert raw(whole) == raw(expected)
    assert (count == 1).all()
    shard, chunk = array.cut
    for part in array.boxes:
        assert all(at % n == 0 for at, n in zip(part.origin, shard, strict=True))
        assert all(size % n == 0 for size, n in zip(part.values.shape, shard, strict=True))
    assert all(outer % inner == 0 for outer, inner in zip(shard, chunk, strict=True))


def permuted(*axes, seed=0):
    order = np.random.default_rng(seed).permutation(8)
    devices = np.array(jax.devices())[order].reshape(axes)
    return Mesh(devices, ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)


SPECS = {
    "rows": ("fsdp", None),
    "columns": (None, "fsdp"),
    "both": ("dp", "fsdp"),
    "crossed": ("fsdp", "dp"),
    "joined": (("fsdp", "dp"), None),
    "partly replicated": ("dp",),
    "replicated": (),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    "on", [mesh(), mesh(8, 1), mesh(4), permuted(2, 4), permuted(4, 2, seed=1)]
)
def test_every_element_of_a_sharded_array_is_held_once(spec, on):
    host = floats(16, 24)
    assert_held(hold(put(host, *spec, on=on)), host)


def test_arrays_of_one_device_are_held_wherever_that_is():
    host = floats(6, 5)
    for place in (None, jax.devices()[0], SingleDeviceSharding(jax.devices()[5])):
        assert_held(hold(jax.device_put(host, place)), host)
    assert_held(hold(jnp.float32(3.5)), np.float32(3.5))


def test_numpy_arrays_are_held_as_they_are_indexed():
    host = floats(12, 10)
    for array in (host, host.T, host[::3, ::-1], np.asfortranarray(host), host[4:5, 0], host[1, 2]):
        assert_held(hold(np.asarray(array)), array)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_are_held_as_their_words_and_say_which_they_are(impl):
    key = jax.random.key(7, impl=impl)
    for keys in (key, jax.random.split(key, 8), jax.random.split(key, (2, 4))):
        array = hold(keys)
        assert_held(array, jax.random.key_data(keys))
        assert (array.dtype, array.key_impl) == (np.uint32, impl)
    spread = jax.device_put(jax.random.split(key, 8), NamedSharding(mesh(), PartitionSpec("fsdp")))
    assert_held(hold(spread), jax.random.key_data(spread))


def test_legacy_keys_are_held_as_the_numbers_that_they_are():
    array = hold(jax.random.PRNGKey(3))
    assert_held(array, jax.random.PRNGKey(3))
    assert array.key_impl is None


def test_a_large_part_is_cut_into_shards_and_chunks(monkeypatch):
    monkeypatch.setattr(chunk_shape, "SHARD_BYTES", 2048)
    monkeypatch.setattr(chunk_shape, "CHUNK_BYTES", 512)
    monkeypatch.setattr(chunk_shape, "MIN_CHUNK_BYTES", 64)
    host_arrays._layout.cache_clear()
    host = floats(64, 32)
    array = hold(put(host, "dp", None))
    assert array.cut == ((16, 32), (4, 32))
    assert_held(array, host)
    host_arrays._layout.cache_clear()


# What a process writes of arrays that others hold too.


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class SeenBy:
    """A sharding over the devices of several processes, as one of them sees it.

    Attributes:
        whole: over the devices of this process, which stand for all.
        owners: the process of each device, by id.
        index: the process that looks.
    """

    whole: NamedSharding
    owners: tuple[int, ...]
    index: int

    def devices_indices_map(self, shape):
        indices = self.whole.devices_indices_map(shape)
        return {Device(one.id, self.owners[one.id]): index for one, index in indices.items()}

    def addressable_devices_indices_map(self, shape):
        everywhere = self.devices_indices_map(shape)
        return {one: at for one, at in everywhere.items() if one.process_index == self.index}

    def shard_shape(self, shape):
        return self.whole.shard_shape(shape)


def written_by(shape, sharding, owners):
    """By process: how often it writes each element, all bytes being one."""
    found = {}
    for index in sorted(set(owners)):
        seen = SeenBy(sharding, owners, index)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "process_index", lambda index=index: index)
            layout = host_arrays._layout(shape, 1, seen, False)
        count = np.zeros(shape, int)
        places = list(seen.addressable_devices_indices_map(shape).values())
        for piece in layout.boxes:
            on_device = np.empty(seen.shard_shape(shape))[piece.within].shape
            box = tuple(
                slice(at, at + size) for at, size in zip(piece.origin, on_device, strict=True)
            )
            count[box] += 1
            held = np.zeros(shape, bool)
            held[places[piece.shard]] = True
            assert held[box].all(), "a process writes what its device holds"
            assert all(
                at % n == 0 and size % n == 0
                for at, size, n in zip(piece.origin, on_device, layout.cut.shard, strict=True)
            )
        found[index] = count
    return found


OWNERS = {
    "one": (0,) * 8,
    "two": (0, 0, 0, 0, 1, 1, 1, 1),
    "two, in turn": (0, 1) * 4,
    "four": (0, 0, 1, 1, 2, 2, 3, 3),
    "four, crossed": (0, 1, 2, 3, 3, 2, 1, 0),
    "eight": tuple(range(8)),
    "uneven": (0, 0, 0, 0, 0, 1, 2, 2),
}


@settings(deadline=None, max_examples=150)
@given(
    owners=st.sampled_from(sorted(OWNERS.values())),
    spec=st.sampled_from(sorted(SPECS.values(), key=str)),
    on=st.sampled_from([mesh(), permuted(2, 4), permuted(4, 2, seed=3)]),
    least=st.sampled_from([1, 1 << 20]),
)
def test_all_processes_together_write_each_element_once(owners, spec, on, least):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_arrays, "_LEAST_SPLIT_BYTES", least)
        patch.setattr(host_arrays, "_LEAST_CELL_BYTES", min(least, 64 << 10))
        host_arrays._layout.cache_clear()
        found = written_by((24, 16), NamedSharding(on, PartitionSpec(*spec)), owners)
    host_arrays._layout.cache_clear()
    assert (sum(found.values()) == 1).all()


@pytest.mark.parametrize("owners", [OWNERS["two"], OWNERS["four"], OWNERS["eight"]])
@pytest.mark.parametrize("shape", [(2048, 1024), (1, 1 << 21), (3, 8, 1 << 17)])
def test_what_all_processes_hold_is_divided_among_them(owners, shape):
    found = written_by(shape, NamedSharding(mesh(), PartitionSpec()), owners)
    share = math.prod(shape) // len(found)
    assert [int(count.sum()) for count in found.values()] == [share] * len(found)


@pytest.mark.parametrize(
    ("shape", "owners", "largest"),
    [
        ((4096, 1536), (0, 1, 2, 0, 1, 2, 0, 1), 1 / 3),  # the columns divide by three
        ((4096, 1024), (0, 1, 2, 0, 1, 2, 0, 1), 6 / 16),  # nothing does: sixteen cells
        ((1000, 1049), (0, 1, 2, 3, 4, 5, 6, 0), 2 / 10),  # of more cells each would be small
        ((1048583, 3), OWNERS["two"], 2 / 3),
        ((2, 1048583), OWNERS["four"], 1 / 2),  # two cells are all that there are
    ],
)
def test_what_does_not_divide_evenly_is_divided_nearly_so(shape, owners, largest):
    found = written_by(shape, NamedSharding(mesh(), PartitionSpec()), owners)
    assert (sum(found.values()) == 1).all()
    assert max(int(count.sum()) for count in found.values()) <= largest * math.prod(shape)


def test_what_is_small_or_can_not_be_divided_one_process_writes():
    everywhere = NamedSharding(mesh(), PartitionSpec())
    for shape in ((4, 4), (), (1048583,)):
        found = written_by(shape, everywhere, OWNERS["two"])
        assert [int(count.sum()) for count in found.values()] == [math.prod(shape), 0]


def test_arrays_that_only_one_process_has_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UnsupportedLeafError, match=r"a/w; b.*over the devices of all processes"):
        Transfers("model", {"a/w": jnp.ones(3), "b": put(floats(8, 8), "fsdp")})


# The arrays may change as soon as they are held.


def spread(host):
    """The same numbers, placed in every way that a training job places them."""
    return {
        "rows": put(host, "fsdp", None),
        "columns": put(host, None, "fsdp"),
        "partly": put(host, "dp", None),
        "replicated": put(host),
        "permuted": put(host, "fsdp", "dp", on=permuted(2, 4)),
        "uncommitted": jnp.array(host),
        "one device": jax.device_put(host, jax.devices()[3]),
    }


def test_deleting_or_donating_an_array_leaves_what_was_held():
    host = np.arange(24 * 16, dtype=np.uint32).reshape(24, 16)
    for end in (lambda leaf: leaf.delete(), jax.jit(lambda leaf: leaf * 2, donate_argnums=0)):
        leaves = spread(host)
        held = Transfers("model", leaves).wait()
        for leaf in leaves.values():
            jax.block_until_ready(end(leaf))
        # Memory that was freed would be used again by these.
        others = [put(np.full_like(host, 7), "fsdp", None) for _ in range(20)]
        for array in held.values():
            assert_held(array, host)
        del others


def test_what_the_host_has_already_is_held_as_it_lies_there():
    """What can't be looked at where it lies goes the other way, as it would for `np.asarray`."""
    dtypes = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"]
    seen = {name: jnp.ones((2, 3), name) for name in dtypes}
    seen |= {"point": jnp.float32(3), "elsewhere": jax.device_put(floats(4), jax.devices()[3])}
    others = {
        "bfloat16 of several": put(floats(8, 8), "fsdp").astype(jnp.bfloat16),
        "bfloat16 without elements": jnp.ones((0, 3), jnp.bfloat16),
        "float8": jnp.ones(3, jnp.float8_e4m3fn),
        "empty": jnp.ones((0, 3)),
        "spread": put(floats(8, 8), "fsdp"),
        "numpy": floats(3),
        "number": 3,
        "key": jax.random.key(0),
    }
    views = host_views({**others, **seen})
    assert views.keys() == seen.keys()
    for name, view in views.items():
        assert raw(np.asarray(view)) == raw(seen[name])
        held = viewed(view, seen[name].sharding, columns=False)
        assert held == Transfers("optimizer", {"w": seen[name]}).wait()["w"]._replace(
            boxes=held.boxes
        )
    for leaf in seen.values():
        leaf.delete()
    assert np.asarray(views["float32"]).tolist() == [[1.0] * 3] * 2
    for dtype in (jnp.float32, jnp.bfloat16):
        gone = jnp.ones(3, dtype)
        gone.delete()
        assert host_views({"gone": gone, "there": jnp.ones(3)}).keys() == {"there"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_view_ends_with_the_save_and_no_later_donation_copies(dtype):
    leaf = jnp.ones((64, 64), dtype)
    before = leaf.unsafe_buffer_pointer()
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    views = host_views({"w": leaf})
    assert views.keys() == {"w"}
    del views
    gc.collect()
    assert step(leaf).unsafe_buffer_pointer() == before


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_views_of_several_devices_end_with_the_save_and_no_later_donation_copies(dtype):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    leaf = step(put(floats(64, 64), "fsdp").astype(dtype))

    def pointers(array):
        return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]

    before = pointers(leaf)
    assert Transfers("optimizer", {"w": leaf}).wait().keys() == {"w"}
    gc.collect()
    assert pointers(step(leaf)) == before


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_traced_values_are_left_to_be_refused(dtype):
    seen = []
    jax.jit(lambda x: seen.append(host_views({"w": x})) or x)(jnp.ones(3, dtype))
    assert seen == [{}]


def test_the_caller_waits_for_no_more_than_the_leaves_to_be_held(some_root_uri, monkeypatch):
    """What there is to say of each is worked out while training goes on."""
    threads = []
    described = host_trees.HostTrees.describe

    def watched(items):
        threads.append(threading.current_thread().name)
        described(items)

    monkeypatch.setattr(host_trees.HostTrees, "describe", watched)
    tree = {"a": jnp.ones(3), "b": put(floats(8, 8), "fsdp"), "c": floats(2), "d": 3}
    with Checkpointer(some_root_uri / "run") as checkpointer:
        handle = checkpointer.save(1, {"model": tree}, meta={})
        handle.wait()
    assert threads[0] == "cairn-save-1"
    assert threading.current_thread().name not in threads


def test_a_numpy_array_of_another_shape_by_then_is_saved_as_it_was(some_root_uri, monkeypatch):
    start, ready = threading.Event(), host_trees.HostTrees.describe

    def later(items):
        start.wait(60)
        ready(items)

    monkeypatch.setattr(host_trees.HostTrees, "describe", later)
    given = floats(4, 6)
    with Checkpointer(some_root_uri / "run") as checkpointer:
        handle = checkpointer.save(1, {"model": {"a": given}}, meta={})
        given.resize(24)
        start.set()
        handle.wait()
    found = restore_item(handle.uri, "model", {"a": floats(4, 6)})
    assert raw(found["a"]) == raw(floats(4, 6))


def test_no_garbage_is_collected_while_leaves_are_held(some_root_uri, monkeypatch):
    """A collection looks at every leaf: many of them would take longer than the leaves do."""
    prepare, claim = checkpointer_module.prepare, Checkpointer._claim
    seen = []

    def watched(function):
        def call(*args, **options):
            seen.append(gc.isenabled())
            return function(*args, **options)

        return call

    monkeypatch.setattr(checkpointer_module, "prepare", watched(prepare))
    monkeypatch.setattr(Checkpointer, "_claim", watched(claim))
    with Checkpointer(some_root_uri / "run") as checkpointer:
        checkpointer.save(1, {"model": {"a": floats(3)}}, meta={}).wait()
        assert gc.isenabled()  # since its work began
        with pytest.raises(UnsupportedLeafError):
            checkpointer.save(2, {"model": {"a": "text"}}, meta={})
    assert gc.isenabled()
    assert seen == [False, False, False]


def test_changing_a_numpy_array_leaves_what_was_held():
    host = floats(6, 4)
    before = host.copy()
    array = hold(host)
    host[...] = 0
    assert_held(array, before)


@functools.partial(jax.jit, donate_argnums=0)
def _advance(leaf):
    return leaf * jnp.uint32(1664525) + jnp.uint32(1013904223)


def advance(tree):
    """A step of the job: every array is donated. What held memory the step has to leave alone."""
    return jax.tree.map(_advance, tree)


def advanced(host, steps):
    """What the numbers are after so many steps; computed without any device."""
    for _ in range(steps):
        host = host * np.uint32(1664525) + np.uint32(1013904223)
    return host


@pytest.fixture
def writes(monkeypatch):
    """Nothing is written until `set` is called: the arrays are only held."""
    allowed = threading.Event()
    open_data_file_writer = tree_writer.open_data_file_writer

    def waiting(folder, **options):
        assert allowed.wait(20)
        return open_data_file_writer(folder, **options)

    monkeypatch.setattr(tree_writer, "open_data_file_writer", waiting)
    yield allowed
    allowed.set()


def test_a_donating_loop_never_changes_what_is_being_saved(some_root_uri, writes):
    """Every save is still to be written when the arrays that it holds are donated again and again.

    What is expected is computed apart, so that nothing here keeps a buffer alive.
    """
    host = np.random.default_rng(0).integers(0, 2**32, (64, 48), np.uint32)
    tree, handles = spread(host), {}
    with Checkpointer(some_root_uri / "run", writer_id="job") as checkpointer:
        for step in range(0, 32, 8):
            writes.clear()
            handles[step] = checkpointer.save(step, {"model": tree}, meta={})
            for _ in range(4):
                tree = advance(tree)
            assert not handles[step].done
            writes.set()
            handles[step].wait()
            before, tree = tree, advance(advance(advance(advance(tree))))
            assert all(leaf.is_deleted() for leaf in before.values()), "nothing is held any more"
    run = Run.open(some_root_uri / "run")
    for step, handle in handles.items():
        expected = advanced(host, step)
        found = restore_item(handle.uri, "model", dict.fromkeys(tree, np.empty_like(host)))
        assert_same(found, dict.fromkeys(tree, expected))
    assert [info.step for info in run.steps()] == sorted(handles)


def test_what_is_changed_or_deleted_after_save_returns_is_saved_as_it_was(some_root_uri, writes):
    host, before = floats(16, 8), floats(16, 8)
    leaves = {"numpy": host, "device": put(floats(16, 8, seed=1), "fsdp", None)}
    with Checkpointer(some_root_uri / "run", writer_id="job") as checkpointer:
        handle = checkpointer.save(1, {"model": leaves}, meta={})
        host[...] = -1
        leaves["device"].delete()
        assert not handle.done
        writes.set()
        handle.wait()
    found = restore_item(handle.uri, "model", {name: np.empty_like(before) for name in leaves})
    assert_same(found, {"numpy": before, "device": floats(16, 8, seed=1)})


def test_an_array_restored_without_a_copy_may_be_donated_and_saved_again(some_root_uri, writes):
    """The memory that was read into is the array's own."""
    host = np.random.default_rng(1).integers(0, 2**32, (64, 48), np.uint32)
    writes.set()
    with Checkpointer(some_root_uri / "run", writer_id="job") as checkpointer:
        tree = spread(host)
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
        )
        first = checkpointer.save(1, {"model": tree}, meta={})
        first.wait()
        again = restore_item(first.uri, "model", target)
        writes.clear()
        second = checkpointer.save(2, {"model": again}, meta={})
        again = advance(again)
        writes.set()
        second.wait()
    for uri in (first.uri, second.uri):
        found = restore_item(uri, "model", dict.fromkeys(tree, np.empty_like(host)))
        assert_same(found, dict.fromkeys(tree, host))
    assert_same(jax.tree.map(np.asarray, again), dict.fromkeys(tree, advanced(host, 1)))


def test_memory_is_let_go_of_once_it_is_written(some_root_uri, monkeypatch):
    """Before Orbax has committed, and before the step is durable."""
    held, left = [], []
    wait, sync = Transfers.wait, save_job.sync_folder

    def remembered(transfers, **options):
        found = wait(transfers, **options)
        held.extend(weakref.ref(part.values) for one in found.values() for part in one.boxes)
        return found

    def looked_at(folder):
        gc.collect()
        left.extend(one for one in held if one() is not None)
        sync(folder)

    monkeypatch.setattr(Transfers, "wait", remembered)
    monkeypatch.setattr(save_job, "sync_folder", looked_at)
    with Checkpointer(some_root_uri / "run", writer_id="job") as checkpointer:
        items = {"model": spread(floats(16, 24)), "optimizer": {"host": floats(3)}}
        checkpointer.save(1, items, meta={}).wait()
    assert len(held) > 10
    assert not left
