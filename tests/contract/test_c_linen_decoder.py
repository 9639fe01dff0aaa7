"""The decoder as a Linen model: embeddings, generation, other forms, storage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from cairn import EasyDeLState, LinenDecoderForCausalLM, TrainState, TreeStructureError
from tests.contract.subjects import DECODER, SGD, assert_same_bits, host
from tests.state.forward import outputs_of
from tests.state.my_model import batch

UNTIED = DECODER.replace(tie_word_embeddings=False, num_hidden_layers=1)


@pytest.fixture(scope="module")
def model():
    return LinenDecoderForCausalLM(UNTIED)


@pytest.fixture
def changed():
    """A model of one's own to change."""
    return LinenDecoderForCausalLM(UNTIED)


@pytest.fixture(scope="module")
def logits(model):
    return np.asarray(model(batch(2, 6)).logits)


def test_call_gives_logits_and_with_labels_the_loss(model, logits):
    """`__call__` runs the one decoder through `nnx.bridge`: the NNX form gives the same."""
    assert isinstance(model.module, linen.Module)
    assert logits.shape == (2, 6, 256)
    expected = outputs_of(model.to_nnx(), batch(2, 6), labels=batch(2, 6))
    np.testing.assert_allclose(expected.logits, logits, rtol=1e-5, atol=1e-6)
    outputs = model(batch(2, 6), labels=batch(2, 6))
    np.testing.assert_allclose(outputs.loss, expected.loss, rtol=1e-5)


def test_the_model_trains_as_a_train_state(model):
    state = TrainState.create(params=model.params, tx=optax.sgd(0.1), apply_fn=model)

    @jax.jit
    def step(state):
        def loss_of(params):
            return model(batch(2, 6), labels=batch(2, 6), params=params).loss

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(3):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("side", ["input", "output"])
def test_embeddings_are_got_and_set(changed, side):
    """get_input_embeddings, set_input_embeddings, get_output_embeddings, set_output_embeddings."""
    get = getattr(changed, f"get_{side}_embeddings")
    matrix = get()
    assert matrix.shape == (256, 64)
    before = np.asarray(changed(batch(2, 6)).logits)
    getattr(changed, f"set_{side}_embeddings")(2 * matrix)
    np.testing.assert_array_equal(get(), 2 * np.asarray(matrix))
    after = np.asarray(changed(batch(2, 6)).logits)
    if side == "output":
        np.testing.assert_allclose(after, 2 * before, rtol=1e-4, atol=1e-5)
    else:
        assert (after != before).any()
    with pytest.raises(ValueError, match=r"embeddings: expected shape \(256, 64\)"):
        getattr(changed, f"set_{side}_embeddings")(matrix[:3])


def test_get_decoder_and_set_decoder_exchange_all_but_the_head(changed):
    other = LinenDecoderForCausalLM(UNTIED, seed=1)
    head = host({"head": changed.get_output_embeddings()})
    changed.set_decoder(other.get_decoder())
    assert_same_bits(changed.get_decoder(), other.get_decoder())
    assert_same_bits({"head": changed.get_output_embeddings()}, head)
    with pytest.raises(TreeStructureError, match="model/norm/scale: missing"):
        changed.set_decoder({name: v for name, v in other.get_decoder().items() if name != "norm"})


def test_init_cache_has_room_for_max_length_tokens(model):
    cache = model.init_cache(3, 10)
    assert {3, 10} <= set(cache.keys.shape)
    assert not np.asarray(cache.keys).any()


def test_inputs_for_generation_continue_left_padded_prompts(model):
    """prepare_inputs_for_generation extends the mask; update_inputs_for_generation moves on."""
    ids = jnp.concatenate([jnp.zeros((2, 2), jnp.int32), batch(2, 4)], axis=1)
    mask = jnp.concatenate([jnp.zeros((2, 2), jnp.int32), jnp.ones((2, 4), jnp.int32)], axis=1)
    inputs = model.prepare_inputs_for_generation(ids, 12, mask)
    assert inputs["attention_mask"].shape == (2, 12)
    assert inputs["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3]
    tokens, found = ids, []
    for _ in range(3):
        outputs = model(tokens, **inputs)
        following = outputs.logits[:, -1].argmax(-1).astype(jnp.int32)
        found.append(np.asarray(following))
        inputs = model.update_inputs_for_generation(outputs, inputs)
        tokens = following[:, None]
    assert inputs["position_ids"].tolist() == [[6], [6]]
    expected = model.generate(batch(2, 4), max_new_tokens=3).sequences[:, 4:]
    np.testing.assert_array_equal(np.stack(found, 1), expected)


def test_can_generate_and_generates(model):
    assert model.can_generate()
    assert model.generate(batch(1, 4), max_new_tokens=2).sequences.shape == (1, 6)


def test_to_easydel_state_is_the_same_model_ready_to_train(model, logits):
    state = model.to_easydel_state(tx=SGD)
    assert isinstance(state, EasyDeLState)
    assert state.opt_state is not None
    np.testing.assert_allclose(state.model(batch(2, 6)).logits, logits, rtol=1e-5, atol=1e-6)


def test_to_pytorch_gives_the_same_logits(model, logits):
    import torch

    theirs = model.to_pytorch()
    with torch.no_grad():
        found = theirs(torch.tensor(np.asarray(batch(2, 6))).long()).logits.numpy()
    assert np.abs(found - logits).max() <= 1e-4 * np.abs(logits).max()


def test_to_8bit_stores_matrices_as_int8_and_stays_near(model, logits):
    small = model.to_8bit()
    assert small.size < 0.5 * model.size
    assert any(leaf.dtype == np.int8 for leaf in host(small.params).values())
    error = np.abs(np.asarray(small(batch(2, 6)).logits) - logits).max()
    assert 0 < error < 0.05 * np.abs(logits).max()
    assert all(leaf.dtype == np.float32 for leaf in host(model.params).values())


def test_save_pretrained_and_from_pretrained_give_the_same_model_back(model, tmp_path):
    model.save_pretrained(tmp_path / "hf")
    again = LinenDecoderForCausalLM.from_pretrained(tmp_path / "hf")
    assert isinstance(again, LinenDecoderForCausalLM)
    assert_same_bits(again.params, model.params)
    assert again.config.num_hidden_layers == 1
