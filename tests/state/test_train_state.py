from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from state.errors import (
    ArgumentError,
    NotInitializedError,
    OptimizerNotFoundError,
    TreeStructureError,
)
from state.mesh import make_mesh
from state.train_state import TrainState
from storage.errors import StepNotFoundError, TreeMismatchError

TX = optax.adam(1e-1)


class MyState(TrainState, eq=False):
    epoch: int = 0
    batch_stats: Any = None


def params():
    return {"dense": {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.zeros((3,))}}


def grads_like(tree):
    return jax.tree.map(jnp.ones_like, tree)


def assert_bit_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_create_and_one_step_are_optax_own():
    state = TrainState.create(params=params(), tx=TX, apply_fn=jnp.tanh)
    after = state.apply_gradients(grads=grads_like(params()))
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = TX.update(grads_like(params()), TX.init(params()), params())
    assert_bit_equal(after.params, optax.apply_updates(params(), updates))
    assert_bit_equal(after.opt_state, opt_state)
    assert (int(state.step), int(after.step)) == (0, 1)
    assert after.apply_fn is jnp.tanh


def linen_params():
    return linen.Dense(3).init(jax.random.key(0), jnp.ones((2, 4)))["params"]


def nnx_params():
    return nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Param)


@pytest.mark.parametrize("make", [params, linen_params, nnx_params, lambda: (jnp.ones(3), [])])
def test_any_tree_of_parameters_trains_under_jit_with_donation(make):
    state = TrainState.create(params=make(), tx=TX)
    step = jax.jit(lambda s: s.apply_gradients(grads=grads_like(s.params)), donate_argnums=0)
    before = jax.tree.map(np.array, state.params)
    for _ in range(2):
        state = step(state)
    assert int(state.step) == 2
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(new, old - 0.2, rtol=1e-4, atol=1e-4)


def test_added_fields_are_part_of_the_tree_and_change_only_when_passed():
    stats = {"mean": jnp.ones((3,))}
    state = MyState.create(params=params(), tx=TX, epoch=2, batch_stats=stats)
    assert any(leaf is stats["mean"] for leaf in jax.tree.leaves(state))
    after = state.apply_gradients(grads=grads_like(params()))
    assert after.epoch == 2
    assert after.batch_stats is stats
    moved = state.apply_gradients(grads=grads_like(params()), epoch=3, batch_stats={})
    assert (moved.epoch, moved.batch_stats) == (3, {})
    assert state.replace(epoch=9).epoch == 9


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="expected fields among batch_stats, epoch"):
        MyState.create(params=params(), tx=TX, colour="red")
    with pytest.raises(ArgumentError, match="expected tx with opt_state"):
        TrainState.create(params=params(), opt_state=())
    with pytest.raises(NotInitializedError, match="create the state with tx="):
        TrainState.create(params=params()).apply_gradients(grads=params())
    with pytest.raises(TreeStructureError, match="dense/bias: missing"):
        TrainState.create(params=params(), tx=TX).apply_gradients(
            grads={"dense": {"kernel": jnp.ones((4, 3))}}
        )


def test_a_state_is_saved_and_restored_with_its_added_fields(tmp_path):
    state = MyState.create(
        params=params(), tx=TX, epoch=2, batch_stats={"mean": jnp.full((3,), 0.1, jnp.bfloat16)}
    ).apply_gradients(grads=grads_like(params()))
    state.save_state(tmp_path / "r", extras={"position": 7}, verbose=False).wait()
    fresh = MyState.create(
        params=params(), tx=TX, epoch=0, batch_stats={"mean": jnp.zeros((3,), jnp.bfloat16)}
    )
    for target in (fresh, jax.eval_shape(lambda: fresh.replace(epoch=jnp.int32(0)))):
        if target is not fresh:
            target = target.replace(epoch=0)  # a Python number is given back as one
        loaded = MyState.load_state(tmp_path / "r", target)
        assert_bit_equal(loaded, state)
        assert loaded.epoch == 2
        assert type(loaded.epoch) is int
        assert loaded.extras == {"position": 7}


def test_leaves_go_where_the_target_has_them(tmp_path):
    state = TrainState.create(params={"w": jnp.arange(64.0).reshape(8, 8)}, tx=TX)
    state.save_state(tmp_path / "r", step=1, verbose=False).wait()
    place = NamedSharding(make_mesh((1, 8, 1, 1)), PartitionSpec("fsdp"))
    target = TrainState.create(params=jax.device_put({"w": jnp.zeros((8, 8))}, place), tx=TX)
    loaded = TrainState.load_state(tmp_path / "r", target)
    assert loaded.params["w"].sharding == place
    assert loaded.opt_state[0].mu["w"].sharding == place
    np.testing.assert_array_equal(loaded.params["w"], state.params["w"])
    assert int(loaded.step) == 1


def test_a_checkpoint_that_does_not_fit_lists_every_leaf(tmp_path):
    state = TrainState.create(params=params(), tx=TX)
    state.save_state(tmp_path / "r", step=1, save_optimizer=False, verbose=False).wait()
    with pytest.raises(OptimizerNotFoundError, match="optimizer='skip'"):
        TrainState.load_state(tmp_path / "r", state)
    assert TrainState.load_state(tmp_path / "r", state, optimizer="skip").opt_state is None
    other = MyState.create(
        params={"dense": {"kernel": jnp.zeros((4, 4))}, "new": jnp.zeros(2)},
        batch_stats=jnp.ones(1),
    )
    with pytest.raises(TreeMismatchError) as caught:
        MyState.load_state(tmp_path / "r", other)
    assert {problem.partition(":")[0] for problem in caught.value.problems} == {
        "model/dense/bias",
        "model/dense/kernel",
        "model/new",
        "fields/batch_stats",
        "fields/epoch",
    }
    with pytest.raises(StepNotFoundError):
        TrainState.load_state(tmp_path / "r", state, step=9)
