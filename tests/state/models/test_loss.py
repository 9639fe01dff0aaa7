import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.loss.loss_utils import ForCausalLMLoss

from cairn import ArgumentError, CausalLMOutput, DecoderForCausalLM, LossConfig
from tests.state.hf_models import tiny_llama, tokens
from tests.state.my_model import MyModel, MyModelConfig, batch, my_model

VOCABULARY = 17
IGNORE_INDEX = -100
"""A label that does not count, as in PyTorch."""


def causal_lm_loss(logits, labels, config=None, **others):
    """Return what a model's `compute_loss` makes of any logits."""
    return my_model().compute_loss(labels, logits, config, **others)


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
    loss, grads = jax.jit(jax.value_and_grad(lambda x: causal_lm_loss(x, labels)[0]))(
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


@pytest.mark.parametrize("dtypes", [(jnp.int32, jnp.int32), (jnp.float32, jnp.float32)])
def test_dtypes_that_mean_nothing_are_refused(dtypes):
    logits, labels = jnp.ones((2, 4, VOCABULARY), dtypes[0]), jnp.ones((2, 4), dtypes[1])
    with pytest.raises(ArgumentError, match=r"(logits|labels): expected an? (floating|integer)"):
        causal_lm_loss(logits, labels)


def test_an_auxiliary_loss_that_is_no_scalar_is_refused(example):
    logits, labels = map(jnp.asarray, example)
    config = LossConfig(auxiliary_loss_coefficient=0.5)
    with pytest.raises(ArgumentError, match=r"auxiliary_loss: expected a scalar; found shape"):
        causal_lm_loss(logits, labels, config, auxiliary_loss=jnp.ones((2,)))


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_a_label_outside_of_the_vocabulary_is_no_number(example, label):
    logits, labels = example
    labels[1, 3] = label
    loss, _ = causal_lm_loss(jnp.asarray(logits), jnp.asarray(labels))
    assert jnp.isnan(loss)
    labels[1, 3] = IGNORE_INDEX
    loss, _ = causal_lm_loss(jnp.asarray(logits), jnp.asarray(labels))
    assert jnp.isfinite(loss)


def test_what_does_not_count_may_be_infinite(example):
    logits, labels = example
    expected, _ = causal_lm_loss(jnp.asarray(logits), jnp.asarray(labels))
    logits[2, 4:] = np.inf
    loss, _ = causal_lm_loss(jnp.asarray(logits), jnp.asarray(labels))
    assert loss == expected


def loaded(folder, tied):
    tiny_llama(tie_word_embeddings=tied, attention_bias=True).save_pretrained(folder)
    ours = DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)
    return ours, ours.to_pytorch()


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A model, and it in PyTorch."""
    return loaded(tmp_path_factory.mktemp("loss"), tied=False)


@pytest.fixture(params=[False, True], ids=["untied, plain", "tied, smoothed"])
def pair(request, untied, tmp_path):
    return loaded(tmp_path, tied=True) if request.param else untied


SMOOTHED = LossConfig(label_smoothing=0.1, z_loss_coefficient=1e-2)


def test_loss_and_every_gradient_equal_pytorch(pair):
    """The same batch, with padding on the right, through the model: loss within 1e-5 relative."""
    ours, theirs = pair
    config = SMOOTHED if ours.config.tie_word_embeddings else None
    ids = tokens(3, 12)
    mask, labels = np.ones_like(ids), ids.copy()
    mask[1, 8:], labels[1, 8:], labels[2, :5] = 0, IGNORE_INDEX, IGNORE_INDEX
    outputs = theirs(
        torch.tensor(ids).long(),
        attention_mask=torch.tensor(mask).long(),
        labels=torch.tensor(labels).long(),
    )
    expected = outputs.loss
    if config is not None:
        scores = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
        targets = torch.tensor(labels[:, 1:]).long().reshape(-1)
        smooth = torch.nn.functional.cross_entropy(
            scores, targets, ignore_index=IGNORE_INDEX, label_smoothing=config.label_smoothing
        )
        normalisers = torch.logsumexp(scores, dim=-1)[targets != IGNORE_INDEX]
        expected = smooth + config.z_loss_coefficient * normalisers.square().mean()
    theirs.zero_grad()
    expected.backward()

    transform = ours.pure_transform_fn(**({} if config is None else {"loss_config": config}))
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    step = jax.jit(jax.value_and_grad(lambda params, inputs: transform(params, inputs).loss))
    loss, grads = step(ours.params, {name: jnp.asarray(value) for name, value in inputs.items()})
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)

    holder = nnx.eval_shape(lambda: DecoderForCausalLM(ours.config))
    found = holder.merge_params(grads).to_torch()
    expected_grads = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    assert expected_grads.keys() <= found.keys()
    worst = {
        name: np.abs(found[name].numpy() - grad).max() / np.abs(grad).max()
        for name, grad in expected_grads.items()
    }
    print(f"loss {abs(loss.item() / expected.item() - 1):.1e}, grads {max(worst.values()):.1e}")
    assert max(worst.values()) <= 2e-5, worst


def test_a_batch_in_which_nothing_counts_leaves_every_parameter(untied):
    ours, theirs = untied
    ids = tokens(2, 6)
    nothing = np.full_like(ids, IGNORE_INDEX)
    given = torch.tensor(ids).long(), torch.tensor(nothing).long()
    assert torch.isnan(theirs(given[0], labels=given[1]).loss)
    transform = ours.pure_transform_fn(loss_config=SMOOTHED)
    inputs = {"input_ids": jnp.asarray(ids), "labels": jnp.asarray(nothing)}
    loss, grads = jax.jit(jax.value_and_grad(lambda p, x: transform(p, x).loss))(
        ours.params, inputs
    )
    assert loss == 0.0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("kind", ["decoder", "own"])
def test_the_call_takes_a_loss_config(untied, kind):
    ours = untied[0] if kind == "decoder" else my_model()
    ids = jnp.asarray(tokens(2, 6))
    call = jax.jit(lambda ids: ours(input_ids=ids, labels=ids, loss_config=SMOOTHED))
    outputs = call(ids)
    loss, metrics = ours.compute_loss(labels=ids, logits=outputs.logits, config=SMOOTHED)
    np.testing.assert_allclose(outputs.loss, loss, rtol=1e-6)
    assert metrics.keys() == outputs.metrics.keys() >= {"cross_entropy", "z_loss"}
    assert loss > ours.compute_loss(labels=ids, logits=outputs.logits)[0]


@pytest.mark.parametrize("kind", ["mapping", "dataclass"])
def test_a_forward_passs_auxiliary_loss_joins_the_loss(kind):
    class Routed(MyModel):
        def __call__(self, input_ids, **kwargs):
            outputs = {"logits": super().__call__(input_ids), "auxiliary_loss": jnp.float32(3.0)}
            return outputs if kind == "mapping" else CausalLMOutput(**outputs)

    model = Routed(MyModelConfig(), rngs=nnx.Rngs(0))
    ids = batch()
    plain = my_model()(ids, labels=ids).loss
    config = LossConfig(auxiliary_loss_coefficient=0.5)
    for given, expected in ((None, plain), (config, plain + 1.5)):
        outputs = model(ids, labels=ids, loss_config=given)
        loss = outputs["loss"] if kind == "mapping" else outputs.loss
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
