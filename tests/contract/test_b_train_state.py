"""TrainState: any JAX model's parameters in training, with fields of one's own."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cairn as package
from cairn import Checkpointer, EasyDeLState, Run, TrainState
from tests.contract.subjects import assert_same_bits, make_state

SGD = optax.sgd(0.5, momentum=0.9)


class Extended(TrainState, eq=False):
    """The documented extension: an epoch, batch statistics and metrics."""

    epoch: Any = 0
    batch_stats: Any = None
    metrics: Any = None


def apply(params, x):
    return x @ params["kernel"] + params["bias"][None]


def params():
    return {"kernel": jnp.arange(6.0).reshape(3, 2), "bias": jnp.zeros((2,))}


@pytest.fixture
def state():
    return TrainState.create(params=params(), tx=SGD, apply_fn=apply)


@pytest.fixture
def extended():
    return Extended.create(
        params=params(),
        tx=SGD,
        epoch=jnp.int32(2),
        batch_stats={"mean": jnp.ones((2,))},
        metrics={"accuracy": jnp.float32(0.5)},
    )


def ones(tree):
    return jax.tree.map(jnp.ones_like, tree)


def test_train_state_is_a_pytree_that_the_package_exports(state):
    assert package.TrainState is TrainState
    leaves, structure = jax.tree.flatten(state)
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, TrainState)
    jitted = jax.jit(lambda s: s.apply_gradients(grads=s.params), donate_argnums=0)
    assert int(jitted(again).step) == 1


@pytest.mark.parametrize("step", [None, 5])
def test_step_starts_at_zero_or_as_given_and_counts(step):
    given = {} if step is None else {"step": step}
    state = TrainState.create(params=params(), tx=SGD, **given)
    assert int(state.step) == (step or 0)
    assert int(state.apply_gradients(grads=ones(state.params)).step) == (step or 0) + 1


def test_params_are_kept_as_they_are(state):
    assert_same_bits(state.params, params())
    assert jax.tree.structure(state.params) == jax.tree.structure(params())


def test_tx_is_static_and_opt_state_is_its_state(state):
    assert state.tx is SGD
    assert_same_bits(state.opt_state, SGD.init(state.params))
    held = jax.tree.leaves((state.step, state.params, state.opt_state))
    assert len(jax.tree.leaves(state)) == len(held)
    given = TrainState.create(params=params(), tx=SGD, opt_state=ones(state.opt_state))
    assert_same_bits(given.opt_state, ones(state.opt_state))


def test_apply_fn_is_static_and_applies_the_model(state):
    x = jnp.ones((4, 3))
    out = jax.jit(lambda s: s.apply_fn(s.params, x))(state)
    np.testing.assert_allclose(out, apply(params(), x))


def test_apply_gradients_is_one_optax_update_for_grads(state):
    after = state.apply_gradients(grads=ones(state.params))
    again = after.apply_gradients(grads=ones(state.params))
    np.testing.assert_allclose(after.params["bias"], [-0.5, -0.5])
    np.testing.assert_allclose(again.params["bias"], [-1.45, -1.45])  # momentum 0.9
    np.testing.assert_array_equal(state.params["bias"], [0, 0])
    with pytest.raises(ValueError, match="bias: missing"):
        state.apply_gradients(grads={"kernel": state.params["kernel"]})


def test_apply_gradients_passes_kwargs_on_and_leaves_other_fields(extended):
    after = extended.apply_gradients(grads=ones(extended.params))
    for name in ("epoch", "batch_stats", "metrics"):
        assert_same_bits({"field": getattr(after, name)}, {"field": getattr(extended, name)})
    kwargs = {"batch_stats": {"mean": jnp.zeros((2,))}}
    after = extended.apply_gradients(grads=ones(extended.params), **kwargs)
    np.testing.assert_array_equal(after.batch_stats["mean"], [0, 0])
    assert int(after.epoch) == 2


def test_replace_gives_a_new_state(extended):
    other = extended.replace(epoch=jnp.int32(3))
    assert (int(other.epoch), int(extended.epoch)) == (3, 2)
    assert other.params is extended.params


@pytest.mark.parametrize("name", ["epoch", "batch_stats", "metrics"])
def test_an_added_field_is_part_of_the_tree_and_is_restored(extended, name, tmp_path):
    """`epoch`, `batch_stats` and `metrics`, one at a time."""
    value = jax.tree.leaves(getattr(extended, name))
    assert {id(leaf) for leaf in value} <= {id(leaf) for leaf in jax.tree.leaves(extended)}
    extended.save_state(tmp_path / "r", wait=True, verbose=False)
    Checkpointer.for_run(tmp_path / "r").close()
    blank = jax.tree.map(jnp.zeros_like, extended)
    loaded = Extended.load_state(tmp_path / "r", target=blank)
    assert_same_bits({"field": getattr(loaded, name)}, {"field": getattr(extended, name)})


def linen():
    return nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 3)))["params"]


def nnx_state():
    return nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)


def equinox():
    return eqx.filter(eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.is_array)


@pytest.mark.parametrize("make", [linen, nnx_state, equinox, params])
def test_any_kind_of_parameters_trains_is_saved_and_restored(make, tmp_path):
    state = TrainState.create(params=make(), tx=SGD)
    state = state.apply_gradients(grads=ones(state.params))
    handle = state.save_state(tmp_path / "r", wait=True, verbose=False)
    Checkpointer.for_run(tmp_path / "r").close()
    assert (handle.done, handle.step) == (True, 1)
    target = jax.eval_shape(lambda: TrainState.create(params=make(), tx=SGD))
    loaded = TrainState.load_state(tmp_path / "r", target=target)
    assert_same_bits(loaded, state)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(state.params)


def test_easydel_state_and_train_state_share_one_saving_path(state, tmp_path, monkeypatch):
    stored = []
    save = Checkpointer.save_with

    def watched(self, step, items, options):
        stored.append(sorted(items))
        return save(self, step, items, options)

    monkeypatch.setattr(Checkpointer, "save_with", watched)
    easydel = make_state()
    assert isinstance(easydel, EasyDeLState)
    easydel.save_state(tmp_path / "a", wait=True, verbose=False)
    state.save_state(tmp_path / "b", wait=True, verbose=False)
    for run in ("a", "b"):
        Checkpointer.for_run(tmp_path / run).close()
        found = Run.open(tmp_path / run)
        assert set(found.manifest(found.latest()).items) == {"meta", "model", "optimizer"}
    assert stored == [["model", "optimizer"]] * 2
