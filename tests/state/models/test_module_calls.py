"""A module's forward pass under jit and grad: static arguments, prepared inputs, purity."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cairn import ArgumentError, DecoderForCausalLM, LossConfig, TreeStructureError
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model
from tests.state.seams import static_arguments
from tests.tiny import TINY


class Pooling(enum.Enum):
    MEAN = "mean"
    LAST = "last"


class Pooled(MyModel):
    """Python branches on two of its arguments, so that they must be static."""

    traces = 0

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        pooling: Pooling | None = None,
        scale: float = 1.0,
        normalised=False,
    ):
        Pooled.traces += 1
        logits = super().__call__(input_ids) * scale
        if normalised:
            logits = jax.nn.log_softmax(logits, axis=-1)
        if pooling is Pooling.MEAN:
            return logits.mean(axis=1, keepdims=True)
        return logits[:, -1:] if pooling is Pooling.LAST else logits


@pytest.fixture
def pooled():
    Pooled.traces = 0
    return Pooled(MyModelConfig(), rngs=nnx.Rngs(0))


def test_static_arguments_are_read_off_the_signature():
    def forward(
        self,
        input_ids: jax.Array,
        mask: jax.Array | None = None,
        kind: Literal["a", "b"] = "a",
        train: bool | None = None,
        heads: int = 1,
        at: int | jax.Array = 0,
        rate: float = 0.1,
        act: Callable[[Any], Any] = jnp.tanh,
        dtype: np.dtype[Any] | None = None,
        anything: Any = True,
        other: UnknownHere | None = None,  # noqa: F821
        *rest: bool,
        plain=False,
        count=3,
        **more: bool,
    ):
        pass

    # One name is unknown, so that the annotations stay text: the answer must not change much.
    as_text = ("train", "heads", "act", "anything", "plain")
    assert static_arguments(forward) == as_text
    forward.__annotations__.pop("other")
    whole = ("kind", "train", "heads", "act", "dtype", "anything", "plain")
    assert static_arguments(forward) == whole


def test_the_decoders_and_a_users_static_arguments(pooled):
    decoder = nnx.eval_shape(lambda: DecoderForCausalLM(TINY))
    assert decoder.get_static_arguments() == ("loss_config", "logits_to_keep")
    assert pooled.get_static_arguments() == ("pooling", "normalised", "loss_config")
    assert my_model().get_static_arguments() == ("loss_config",)


def test_jit_takes_the_static_arguments_by_name(pooled):
    graphdef, state = nnx.split(pooled)

    def call(state, input_ids, **inputs):
        return nnx.merge(graphdef, state)(input_ids=input_ids, **inputs)

    jitted = jax.jit(call, static_argnames=pooled.get_static_arguments())
    for pooling, normalised in ((Pooling.MEAN, True), (Pooling.LAST, False), (None, False)):
        inputs = {"pooling": pooling, "normalised": normalised}
        expected = pooled(batch(), **inputs)
        np.testing.assert_allclose(jitted(state, batch(), **inputs), expected, rtol=1e-5, atol=1e-6)
    decoder = DecoderForCausalLM(TINY)
    config = LossConfig(z_loss_coefficient=0.1)
    ids = jnp.asarray(batch()) % 128
    graphdef, state = nnx.split(decoder)
    jitted = jax.jit(call, static_argnames=decoder.get_static_arguments())
    outputs = jitted(state, ids, labels=ids, loss_config=config)
    assert float(outputs.metrics["z_loss"]) > 0
    last = jitted(state, ids, logits_to_keep=2).logits
    np.testing.assert_allclose(last, outputs.logits[:, -2:], atol=1e-6)
    with pytest.raises(ArgumentError, match="logits_to_keep: expected 1 or more, and no labels"):
        decoder(ids, labels=ids, logits_to_keep=2)


def test_prepared_inputs_drop_none_and_hold_plain_static_values(pooled):
    ids = batch()
    given = {"input_ids": ids, "labels": None, "normalised": jnp.array(True), "scale": 2.0}
    prepared = pooled.prepare_inputs_for_call(**given)
    assert prepared.keys() == {"input_ids", "normalised", "scale"}
    assert prepared["input_ids"] is ids
    assert prepared["normalised"] is True
    with pytest.raises(ArgumentError, match=r"pooling: expected a value that can be hashed.*list"):
        pooled.prepare_inputs_for_call(input_ids=ids, pooling=["mean"])


def test_a_static_argument_under_trace_is_refused_and_can_be_bound(pooled):
    transform = pooled.pure_transform_fn()
    inputs = {"input_ids": batch(), "normalised": True}
    with pytest.raises(ArgumentError, match=r"normalised: .*pure_transform_fn\(name=value\)"):
        jax.jit(transform)(pooled.params, inputs)
    bound = pooled.pure_transform_fn(normalised=True, pooling=Pooling.LAST)
    found = jax.jit(bound)(pooled.params, {"input_ids": batch()})
    expected = pooled(batch(), normalised=True, pooling=Pooling.LAST)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ArgumentError, match=r"pure_transform_fn: .*found scale; pass the others"):
        pooled.pure_transform_fn(scale=2.0)


def test_the_documented_training_step_traces_once(pooled):
    transform_fn = pooled.pure_transform_fn()

    @jax.jit
    def train_step(params, inputs):
        outputs = transform_fn(params, inputs)
        return outputs.loss

    losses, params = [], pooled.params
    for seed in (0, 1, 2):
        inputs = {"input_ids": batch(seed=seed), "labels": batch(seed=seed)}
        losses.append(float(train_step(params, inputs)))
    assert Pooled.traces == 1
    step = jax.jit(jax.value_and_grad(lambda params, inputs: transform_fn(params, inputs).loss))
    for seed in (0, 1, 2):
        inputs = {"input_ids": batch(seed=seed), "labels": batch(seed=seed)}
        loss, grads = step(params, inputs)
        np.testing.assert_allclose(loss, losses[seed], rtol=1e-6)
    assert Pooled.traces == 2
    np.testing.assert_allclose(losses[2], pooled(**inputs).loss, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))


class Normed(MyModel):
    """Counts, averages and draws: all that a forward pass can change."""

    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.norm = nnx.BatchNorm(config.vocab_size, rngs=settings["rngs"])
        self.noise = nnx.Dropout(0.5, rngs=settings["rngs"])

    def __call__(self, input_ids, **kwargs):
        return self.norm(super().__call__(input_ids))


def test_the_pure_function_changes_no_module_and_leaks_nothing():
    model = Normed(MyModelConfig(), rngs=nnx.Rngs(0))
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    transform = model.pure_transform_fn()
    inputs = {"input_ids": batch(), "labels": batch()}
    with jax.checking_leaks():
        loss, grads = jax.jit(
            jax.value_and_grad(lambda params, inputs: transform(params, inputs).loss)
        )(model.params, inputs)
    again = jax.jit(transform)(model.params, inputs).loss
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    after = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert jax.tree.structure(grads) == jax.tree.structure(model.params)
    # What happens to the module later is no matter of the function's.
    model(batch())
    assert int(model.noise.rngs.count[...]) > 0
    assert float(transform(model.params, inputs).loss) == pytest.approx(float(loss), rel=1e-6)


def test_the_pure_function_outlives_the_modules_arrays():
    model = Normed(MyModelConfig(), rngs=nnx.Rngs(0))
    transform, params = model.pure_transform_fn(), jax.tree.map(jnp.copy, model.params)
    inputs = {"input_ids": batch(), "labels": batch()}
    expected = transform(params, inputs).loss
    for leaf in jax.tree.leaves(nnx.state(model)):
        leaf.delete()
    assert transform(params, inputs).loss == expected


def test_parameters_of_another_model_are_refused():
    transform = my_model().pure_transform_fn()
    other = MyModel(MyModelConfig(num_layers=3), rngs=nnx.Rngs(0))
    with pytest.raises(TreeStructureError, match="layers/2/kernel"):
        transform(other.params, {"input_ids": batch()})
