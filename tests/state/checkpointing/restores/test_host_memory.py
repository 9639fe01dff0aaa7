"""Leaves that go to other devices than CPUs pass through one window of memory on the host."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from cairn import Checkpointer, load
from cairn.storage.arrays.box_buffers import ALIGNMENT
from tests.state.checkpointing.restores.elsewhere import devices_elsewhere
from tests.state.seams import HostMemory

WINDOW = 16 * ALIGNMENT
BYTE = np.dtype(np.uint8)


class Transfer:
    """What is on its way to a device."""

    def __init__(self, parts):
        self.parts, self.ended = parts, False

    def block_until_ready(self):
        self.ended = True


@given(st.lists(st.tuples(st.integers(1, 20 * ALIGNMENT), st.integers(1, 3)), max_size=40))
def test_no_memory_is_used_again_before_its_transfer_has_ended(leaves):
    memory = HostMemory(WINDOW)
    sent = []
    for size, count in leaves:
        while not memory.fits((size,), count, BYTE):
            assert memory.wait(), "nothing is on its way, and there is no room"
        parts, slot = memory.passing((size,), count, BYTE)
        moving = [one for one in sent if not one.ended]
        taken = [part for one in moving for part in one.parts]
        assert [part.shape for part in parts] == [(size,)] * count
        assert all(part.ctypes.data % ALIGNMENT == 0 for part in parts)
        assert not any(np.shares_memory(a, b) for a in parts for b in [*taken, *others(parts, a)])
        assert not moving or sum(part.nbytes for part in (*taken, *parts)) <= WINDOW
        slot.value = Transfer(parts)
        sent.append(slot.value)
    memory.drain()
    assert all(one.ended for one in sent)


def others(parts, part):
    return [one for one in parts if one is not part]


def test_leaves_that_are_not_yet_sent_keep_their_room():
    memory = HostMemory(WINDOW)
    half = ((WINDOW // 2,), 1, BYTE)
    _, first = memory.passing(*half)
    _, second = memory.passing(*half)
    assert not memory.fits(*half)
    assert not memory.wait()
    second.value = Transfer([])
    assert memory.wait()
    assert not memory.fits((WINDOW,), 1, BYTE)
    first.value = Transfer([])
    assert memory.wait()
    assert memory.fits((WINDOW,), 1, BYTE)


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def test_values_of_every_kind_come_through_a_window_smaller_than_they_are(tmp_path):
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    tree = {
        **{f"w{n}": numbers(128 + n, 512) + n for n in range(12)},
        **{f"norm{n}": numbers(64) + n for n in range(40)},
        "half": numbers(512, 512, dtype=ml_dtypes.bfloat16),
        "larger": numbers(1024, 512),
        "codes": np.arange(-8, 8, dtype=ml_dtypes.int4).reshape(4, 4),
        "key": jax.random.key(7),
        "step": np.int32(3),
        "empty": np.zeros((0, 4), np.float32),
    }
    with Checkpointer(str(tmp_path / "run")) as checkpointer:
        checkpointer.save(1, tree).wait()

    def target(name, leaf):
        shape, dtype = np.shape(leaf), leaf.dtype
        spec = PartitionSpec(None, "b") if name.startswith("w") else PartitionSpec()
        if name == "half":
            dtype = np.dtype(np.float32)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    asked = {name: target(name, leaf) for name, leaf in tree.items()}
    with devices_elsewhere(1 << 20) as most:
        made = load(str(tmp_path / "run"), asked, cast=True)
    for name, leaf in tree.items():
        if name == "key":
            leaf, made[name] = map(jax.random.key_data, (leaf, made[name]))
        assert made[name].sharding == asked[name].sharding or name == "key"
        np.testing.assert_array_equal(made[name], jnp.asarray(leaf, made[name].dtype))
    assert 0 < most[0] <= 1 << 20
