"""EasyDeLBaseModule: generation, argument by argument, and the cache behind it."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cairn import ArgumentError
from tests.contract.subjects import make_decoder
from tests.state.forward import logits_of
from tests.state.my_model import MyModel, MyModelConfig, my_model

IDS = np.random.default_rng(0).integers(1, 256, (2, 5)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    return make_decoder()


@pytest.fixture(scope="module")
def greedy(model):
    return np.asarray(model.generate(input_ids=IDS, max_new_tokens=4).sequences)


def test_input_ids_are_continued_by_the_likeliest_tokens(model, greedy):
    once_more = model.generate(input_ids=IDS, max_new_tokens=4)
    np.testing.assert_array_equal(once_more.sequences, greedy)
    np.testing.assert_array_equal(greedy[:, :5], IDS)
    # Each token is the likeliest one after those before it; one forward pass says so for all.
    likeliest = logits_of(model, greedy).argmax(-1)
    np.testing.assert_array_equal(greedy[:, 5:], likeliest[:, 4:-1])


def test_attention_mask_leaves_padding_on_the_left_out(model, greedy):
    padded = np.concatenate([np.zeros((2, 3), np.int32), IDS], axis=1)
    mask = np.concatenate([np.zeros((2, 3), np.int32), np.ones_like(IDS)], axis=1)
    found = model.generate(padded, attention_mask=mask, max_new_tokens=4).sequences
    np.testing.assert_array_equal(np.asarray(found)[:, 3:], greedy)
    with pytest.raises(ArgumentError, match="padding on the left only"):
        model.generate(padded, attention_mask=mask[:, ::-1], max_new_tokens=4)


@pytest.mark.parametrize("max_new_tokens", [1, 4])
def test_max_new_tokens_bounds_what_is_added(model, greedy, max_new_tokens):
    found = model.generate(IDS, max_new_tokens=max_new_tokens)
    np.testing.assert_array_equal(found.sequences, greedy[:, : 5 + max_new_tokens])
    assert found.lengths.tolist() == [max_new_tokens] * 2


def test_temperature_sharpens_or_flattens_and_zero_is_greedy(model, greedy):
    def draw(temperature, rng=0):
        out = model.generate(IDS, max_new_tokens=4, temperature=temperature, rng=rng)
        return np.asarray(out.sequences)

    np.testing.assert_array_equal(draw(0.0), greedy)
    np.testing.assert_array_equal(draw(1e-4), greedy)
    assert (draw(50.0) != greedy).any()
    np.testing.assert_array_equal(draw(50.0), draw(50.0))
    assert (draw(50.0, rng=1) != draw(50.0)).any()


def test_top_p_draws_from_the_likeliest_only(model, greedy):
    found = model.generate(IDS, max_new_tokens=4, temperature=50.0, top_p=1e-6).sequences
    np.testing.assert_array_equal(found, greedy)
    with pytest.raises(ArgumentError, match="top_p: expected above 0, and at most 1"):
        model.generate(IDS, top_p=1.5)


def test_batch_size_and_max_length_of_init_operations_cache_are_its_shape(model):
    cache = model.init_operations_cache(batch_size=3, max_length=7)
    for kept in (cache.keys, cache.values):
        assert {3, 7} <= set(kept.shape)
        assert not np.asarray(kept).any()
    with pytest.raises(ArgumentError, match="batch_size and max_length of 1 or more"):
        model.init_operations_cache(batch_size=0, max_length=7)


def test_dtype_of_init_operations_cache_is_that_of_keys_and_values(model):
    for dtype, stored in ((None, model.dtype), (jnp.bfloat16, jnp.bfloat16)):
        cache = model.init_operations_cache(batch_size=1, max_length=2, dtype=dtype)
        assert (cache.keys.dtype, cache.values.dtype) == (stored, stored)


def test_starts_mark_left_padding_in_the_cache(model):
    padded = np.concatenate([np.full((1, 2), 9, np.int32), IDS[:1]], axis=1)
    cache = model.init_operations_cache(batch_size=1, max_length=16, starts=jnp.array([2]))
    found = logits_of(model, padded, cache=cache)[:, 2:]
    np.testing.assert_allclose(found, logits_of(model, IDS[:1]), rtol=1e-4, atol=1e-5)


def test_inputs_for_generation_run_the_cached_loop_by_hand(model, greedy):
    """prepare_inputs_for_generation makes the first, update_inputs_for_generation the others."""
    inputs = model.prepare_inputs_for_generation(IDS, 16, jnp.ones_like(jnp.asarray(IDS)))
    found = []
    for _ in range(4):
        outputs = model(**inputs)
        following = outputs.logits[:, -1].argmax(-1).astype(jnp.int32)
        found.append(np.asarray(following))
        inputs = model.update_inputs_for_generation(outputs, following, inputs)
        assert inputs["input_ids"].shape == (2, 1)
    np.testing.assert_array_equal(np.stack(found, 1), greedy[:, 5:])


def test_can_generate_tells_whether_the_forward_pass_takes_a_prompt(model):
    class Scorer(MyModel):
        def __call__(self, pixels):
            return pixels

    scorer = Scorer(MyModelConfig(), rngs=nnx.Rngs(0))
    assert model.can_generate()
    assert my_model().can_generate()
    assert not scorer.can_generate()
    with pytest.raises(ArgumentError, match="a forward pass that takes input_ids"):
        scorer.generate(IDS)
