"""EasyDeLBaseModule: the loss in the call and apart from it, and what LossConfig changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cairn as package
from cairn import ArgumentError, LossConfig
from tests.contract.subjects import make_decoder
from tests.state.forward import outputs_of
from tests.state.my_model import batch, my_model


@pytest.fixture(scope="module")
def model():
    return my_model()


@pytest.fixture(scope="module")
def logits(model):
    return model(batch())


def by_hand(logits, labels):
    """Mean of -log p of each next token that counts."""
    scores = np.asarray(jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32)))
    targets = np.asarray(labels)[:, 1:]
    counts = targets != -100
    chosen = np.take_along_axis(scores, np.where(counts, targets, 0)[..., None], -1)[..., 0]
    return -chosen[counts].mean()


def test_labels_in_the_call_give_outputs_loss(model, logits):
    outputs = model(input_ids=batch(), labels=batch())
    np.testing.assert_array_equal(outputs.logits, logits)
    np.testing.assert_allclose(outputs.loss, by_hand(logits, batch()), rtol=1e-5)
    assert outputs.loss.shape == ()


def test_labels_are_shifted_and_minus_100_does_not_count(model, logits):
    labels = batch().at[:, 3:].set(-100)
    outputs = model(input_ids=batch(), labels=labels)
    np.testing.assert_allclose(outputs.loss, by_hand(logits, labels), rtol=1e-5)


def test_outputs_of_the_decoder_have_no_loss_without_labels():
    outputs = outputs_of(make_decoder(), batch(2, 4))
    assert outputs.loss is None
    assert outputs.logits.shape == (2, 4, 256)


def test_compute_loss_takes_labels_logits_and_config_and_gives_metrics(model, logits):
    loss, metrics = model.compute_loss(labels=batch(), logits=logits, config=None)
    np.testing.assert_allclose(loss, by_hand(logits, batch()), rtol=1e-5)
    assert metrics["cross_entropy"] == loss
    smooth, _ = model.compute_loss(
        labels=batch(), logits=logits, config=LossConfig(label_smoothing=0.3)
    )
    assert smooth != loss
    with pytest.raises(ArgumentError, match=r"labels: expected shape \(batch, tokens\)"):
        model.compute_loss(labels=batch(2, 2), logits=logits)


def test_loss_type_names_a_known_loss():
    assert package.LossConfig is LossConfig
    assert LossConfig(loss_type="cross_entropy") == LossConfig()
    with pytest.raises(ArgumentError, match=r"loss_type: expected one of .*cross_entropy"):
        LossConfig(loss_type="hinge")


def test_label_smoothing_spreads_the_target_over_the_vocabulary(model, logits):
    labels = batch()
    scores = jax.nn.log_softmax(logits[:, :-1])
    spread = -scores.mean(axis=-1).mean()
    loss, _ = model.compute_loss(labels, logits, LossConfig(label_smoothing=0.25))
    np.testing.assert_allclose(loss, 0.75 * by_hand(logits, labels) + 0.25 * spread, rtol=1e-5)


def test_z_loss_coefficient_weighs_the_squared_log_normaliser(model, logits):
    square = jnp.square(jax.nn.logsumexp(logits[:, :-1], axis=-1)).mean()
    plain, _ = model.compute_loss(batch(), logits)
    loss, metrics = model.compute_loss(batch(), logits, LossConfig(z_loss_coefficient=0.1))
    np.testing.assert_allclose(loss - plain, 0.1 * square, rtol=1e-4)
    np.testing.assert_allclose(metrics["z_loss"], 0.1 * square, rtol=1e-5)


def test_auxiliary_loss_coefficient_weighs_the_models_own_loss(model, logits):
    config = LossConfig(auxiliary_loss_coefficient=0.001)
    plain, _ = model.compute_loss(labels=batch(), logits=logits)
    loss, _ = model.compute_loss(
        labels=batch(), logits=logits, config=config, auxiliary_loss=jnp.float32(500.0)
    )
    np.testing.assert_allclose(loss - plain, 0.5, rtol=1e-4)
    with pytest.raises(ArgumentError, match="auxiliary_loss_coefficient"):
        LossConfig(auxiliary_loss_coefficient=-1.0)
