"""What an array of JAX is besides its values: whether it gives way to dtypes, and may be moved."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cairn import EasyDeLState
from tests.faults.report import is_long
from tests.state.my_model import MyModel, MyModelConfig, my_model

MESH = {"sharding_axis_dims": (2, 4, 1, 1), "auto_shard_model": True}
PLACES = {"mesh": MESH} | ({"one_device": {}} if is_long() else {})


class WithGain(MyModel):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.gain = nnx.BatchStat(jnp.asarray(1.0))


def gives_way():
    """An optimizer whose state is made of Python numbers, one of them a float32 after a step."""

    def init(params):
        scales = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5), params)
        return {"rate": 0.5, "count": 0, "scales": scales, "seen": 0.0}

    def update(grads, state, params):
        updates = jax.tree.map(
            lambda leaf, scale: -leaf * scale * state["rate"], grads, state["scales"]
        )
        count, seen = state["count"] + 1, jnp.asarray(1.0, jnp.float32)
        return updates, {**state, "count": count, "seen": seen}

    return optax.GradientTransformation(init, update)


def numbers(state):
    leaves = jax.tree.leaves((state.graphstate, state.opt_state))
    return [(str(leaf.dtype), leaf.weak_type, np.asarray(leaf).tobytes()) for leaf in leaves]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_numbers_that_give_way_to_bfloat16_do_so_after_a_load(place, tmp_path):
    """A float32 in their place would make the parameters float32, from the next step on."""
    config = MyModelConfig(sharding_axis_dims=MESH["sharding_axis_dims"])
    model = WithGain(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    if place:
        model.shard_model()
    tx = gives_way()
    state = EasyDeLState.create(model=model, tx=tx, init_opt_state=True)
    state = state.apply_gradients(grads=state.graphstate)
    state.save_state(tmp_path / "run", verbose=False).wait()
    given = {"tx": tx, "model_class": WithGain, "verbose": False, **place}
    loaded = EasyDeLState.load_state(tmp_path / "run", **given)
    again = state.free_opt_state().load_optimizer(tmp_path / "run")
    cast = EasyDeLState.load_state(tmp_path / "run", param_dtype=jnp.float32, **given)
    weak = {"rate": True, "count": True, "scales": True, "seen": False}
    for found in (loaded, again, cast):
        kinds = jax.tree.map(lambda leaf: leaf.weak_type, found.opt_state)
        assert {name: all(jax.tree.leaves(kind)) for name, kind in kinds.items()} == weak
        assert found.graphother["gain"].get_value().weak_type
    assert numbers(loaded) == numbers(state)
    one, other = (one.apply_gradients(grads=one.graphstate) for one in (loaded, state))
    assert numbers(one) == numbers(other)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(one.graphstate)} == {"bfloat16"}


def test_an_optimizer_state_that_jax_may_move_is_one_after_it_is_loaded(tmp_path):
    """Beside parameters that it may move: else they can't go where a batch is any more."""
    state = my_model().to_state(optax.adam(0.1))
    state.save_state(tmp_path / "run", verbose=False).wait()
    loaded = state.free_opt_state().load_optimizer(tmp_path / "run")
    assert not any(leaf.committed for leaf in jax.tree.leaves(loaded.opt_state))
    assert numbers(loaded) == numbers(state)


def in_memory(tree, kind):
    """The arrays of a tree, but for scalars, in that memory of their devices."""
    return jax.tree.map(
        lambda leaf: (
            jax.device_put(leaf, leaf.sharding.with_memory_kind(kind)) if leaf.ndim else leaf
        ),
        tree,
    )


def kinds(tree):
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_offloaded_moments_lie_in_host_memory_again_and_train_on(place, tmp_path):
    model = my_model()
    if place:
        model.shard_model()
    state = EasyDeLState.create(model=model, tx=optax.adam(1e-2), init_opt_state=True)

    def trained(state):
        near = state.replace(opt_state=in_memory(state.opt_state, "device"))
        grads = jax.tree.map(jnp.ones_like, near.graphstate)
        after = near.apply_gradients(grads=grads)
        return after.replace(opt_state=in_memory(after.opt_state, "pinned_host"))

    state = trained(state)
    assert "pinned_host" in kinds(state.opt_state)
    state.save_state(tmp_path / "run", verbose=False).wait()
    given = {"tx": state.tx, "verbose": False, **place}
    loaded = EasyDeLState.load_state(tmp_path / "run", **given)
    again = state.free_opt_state().load_optimizer(tmp_path / "run")
    for found in (loaded, again):
        assert kinds(found.opt_state) == kinds(state.opt_state)
        assert kinds(found.graphstate) == kinds(state.graphstate)
        assert numbers(found) == numbers(state)
    assert numbers(trained(loaded)) == numbers(trained(state))
    near = trained(state).replace(opt_state=in_memory(state.opt_state, "device"))
    near.save_state(tmp_path / "run", verbose=False).wait()
    assert {*kinds(EasyDeLState.load_state(tmp_path / "run", **given).opt_state)} == {"device"}
