import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from state.errors import ArgumentError
from state.loss import IGNORE_INDEX, LossConfig, causal_lm_loss

VOCABULARY = 17


@pytest.fixture
def example():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(3, 9, VOCABULARY)).astype(np.float32) * 3
    labels = generator.integers(0, VOCABULARY, (3, 9)).astype(np.int32)
    labels[0, :4] = IGNORE_INDEX
    labels[2, 5:] = IGNORE_INDEX
    return logits, labels


def test_equals_transformers_loss(example):
    logits, labels = example
    theirs = ForCausalLMLoss(torch.tensor(logits), torch.tensor(labels).long(), VOCABULARY)
    ours, metrics = causal_lm_loss(jnp.asarray(logits), jnp.asarray(labels))
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-6)
    assert int(metrics["tokens"]) == (labels[:, 1:] != IGNORE_INDEX).sum()
    assert ours.dtype == jnp.float32


def test_label_smoothing_equals_pytorch(example):
    logits, labels = example
    theirs = torch.nn.functional.cross_entropy(
        torch.tensor(logits[:, :-1]).reshape(-1, VOCABULARY),
        torch.tensor(labels[:, 1:]).long().reshape(-1),
        ignore_index=IGNORE_INDEX,
        label_smoothing=0.2,
    )
    ours, _ = causal_lm_loss(
        jnp.asarray(logits), jnp.asarray(labels), LossConfig(label_smoothing=0.2)
    )
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-6)


def test_z_loss_is_the_mean_squared_log_normaliser(example):
    logits, labels = example
    counts = labels[:, 1:] != IGNORE_INDEX
    normaliser = np.log(np.exp(logits[:, :-1].astype(np.float64)).sum(-1))
    expected = 1e-2 * (normaliser**2)[counts].mean()
    plain, _ = causal_lm_loss(jnp.asarray(logits), jnp.asarray(labels))
    ours, metrics = causal_lm_loss(
        jnp.asarray(logits), jnp.asarray(labels), LossConfig(z_loss_coefficient=1e-2)
    )
    np.testing.assert_allclose(metrics["z_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(ours, plain + metrics["z_loss"], rtol=1e-6)


def test_auxiliary_loss_is_weighed(example):
    logits, labels = map(jnp.asarray, example)
    plain, _ = causal_lm_loss(logits, labels)
    config = LossConfig(auxiliary_loss_coefficient=0.5)
    ours, _ = causal_lm_loss(logits, labels, config, auxiliary_loss=jnp.float32(2.0))
    np.testing.assert_allclose(ours, plain + 1.0, rtol=1e-6)


def test_gradients_equal_pytorch(example):
    logits, labels = example
    theirs = torch.tensor(logits, requires_grad=True)
    ForCausalLMLoss(theirs, torch.tensor(labels).long(), VOCABULARY).backward()
    ours = jax.grad(lambda x: causal_lm_loss(x, jnp.asarray(labels))[0])(jnp.asarray(logits))
    np.testing.assert_allclose(ours, theirs.grad.numpy(), atol=1e-7)


def test_low_precision_logits_are_summed_in_float32(example):
    logits, labels = example
    low = jnp.asarray(logits).astype(jnp.bfloat16)
    ours, _ = causal_lm_loss(low, jnp.asarray(labels))
    exact, _ = causal_lm_loss(low.astype(jnp.float32), jnp.asarray(labels))
    assert ours == exact


def test_a_batch_in_which_nothing_counts_has_loss_zero_and_no_gradient():
    labels = jnp.full((2, 4), IGNORE_INDEX)
    loss, grads = jax.value_and_grad(lambda x: causal_lm_loss(x, labels)[0])(
        jnp.ones((2, 4, VOCABULARY))
    )
    assert loss == 0.0
    assert not np.any(grads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": "hinge"}, "loss_type: expected one of cross_entropy; found 'hinge'"),
        ({"label_smoothing": 1.0}, r"label_smoothing: expected a number in \[0, 1\)"),
        ({"z_loss_coefficient": -1.0}, "z_loss_coefficient: expected a number >= 0"),
    ],
)
def test_a_config_that_means_nothing_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        LossConfig(**arguments)


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ArgumentError, match=r"found shape \(2, 3\)"):
        causal_lm_loss(jnp.ones((2, 4, VOCABULARY)), jnp.ones((2, 3), jnp.int32))
