"""TrainStep: built from a loss function, compiled once, for any state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cairn as package
from cairn import TrainState, TrainStep
from tests.contract.subjects import assert_same_bits
from tests.state.my_model import batch, my_model

SGD = optax.sgd(0.1)


class Counted(TrainState, eq=False):
    seen: Any = None


def loss_fn(state, params, x):
    loss = jnp.mean(jnp.square(x @ params["kernel"]))
    return loss, {"seen": state.seen + jnp.int32(1), "mean": x.mean()}


@pytest.fixture
def state():
    return Counted.create(params={"kernel": jnp.ones((3, 2))}, tx=SGD, seen=jnp.int32(0))


def test_trainstep_computes_gradients_and_returns_state_and_metrics(state):
    assert package.TrainStep is TrainStep
    x = jnp.arange(12.0).reshape(4, 3)
    loss, grads = jax.value_and_grad(lambda params: loss_fn(state, params, x)[0])(state.params)
    expected = state.apply_gradients(grads=grads)
    after, metrics = TrainStep(loss_fn)(state, x)
    assert isinstance(after, Counted)
    np.testing.assert_allclose(after.params["kernel"], expected.params["kernel"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert float(metrics["mean"]) == 5.5
    assert (int(after.step), int(after.seen)) == (1, 1)


def test_trainstep_is_compiled_once_over_many_steps(state):
    step = TrainStep(loss_fn)
    for seed in range(5):
        state, _ = step(state, jax.random.normal(jax.random.key(seed), (4, 3)))
    assert step.traces == 1
    assert int(state.step) == 5


def test_trainstep_calls_apply_gradients(state):
    class Halved(Counted, eq=False):
        def apply_gradients(self, *, grads, **kwargs):
            return super().apply_gradients(grads=jax.tree.map(lambda g: g / 2, grads), **kwargs)

    halved = Halved.create(params=state.params, tx=SGD, seen=jnp.int32(0))
    x = jnp.ones((4, 3))
    before = np.asarray(state.params["kernel"])
    whole = before - np.asarray(TrainStep(loss_fn, donate=False)(state, x)[0].params["kernel"])
    half = before - np.asarray(TrainStep(loss_fn, donate=False)(halved, x)[0].params["kernel"])
    np.testing.assert_allclose(half, whole / 2, rtol=1e-5)


def test_trainstep_trains_an_easydel_state_too():
    state = my_model().to_state(SGD)
    before = float(state.model(batch(), labels=batch()).loss)

    def loss_of(state, params, ids):
        return state.merge(params)(input_ids=ids, labels=ids).loss

    step = TrainStep(loss_of, donate=False)
    after, metrics = step(state, batch())
    assert float(metrics["loss"]) == pytest.approx(before, rel=1e-5)
    assert float(step(after, batch())[1]["loss"]) < before
    assert_same_bits(after.graphother, state.graphother)
