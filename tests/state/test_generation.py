"""Generation: the tokens of transformers, padding, ends, sampling, compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from state import generation_loop
from state.decoder.config import DecoderConfig
from state.decoder.decoder import DecoderForCausalLM
from state.errors import ArgumentError
from state.sampling import filter_logits
from tests.state.hf_models import save, tiny_llama, tokens


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    theirs = tiny_llama(tie_word_embeddings=True)
    folder = save(theirs, tmp_path_factory.mktemp("generation"))
    return theirs, DecoderForCausalLM.from_pretrained(folder)


def torch_generate(model, ids, mask=None, **options):
    with torch.no_grad():
        made = model.generate(
            torch.tensor(ids).long(),
            attention_mask=torch.tensor(np.ones_like(ids) if mask is None else mask).long(),
            do_sample=False,
            **options,
        )
    return made.numpy()


def test_greedy_tokens_equal_transformers(pair):
    theirs, ours = pair
    ids = tokens(2, 11)
    expected = torch_generate(theirs, ids, max_new_tokens=20, eos_token_id=[], pad_token_id=0)
    found = ours.generate(ids, max_new_tokens=20, eos_token_id=())
    np.testing.assert_array_equal(found.sequences, expected)
    assert found.lengths.tolist() == [20, 20]


def test_left_padded_rows_equal_transformers_and_the_row_alone(pair):
    theirs, ours = pair
    ids = tokens(2, 9)
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    expected = torch_generate(theirs, ids, mask, max_new_tokens=8, eos_token_id=[], pad_token_id=0)
    found = ours.generate(ids, mask, max_new_tokens=8, eos_token_id=())
    np.testing.assert_array_equal(found.sequences, expected)
    alone = ours.generate(ids[1:, 4:], max_new_tokens=8, eos_token_id=())
    np.testing.assert_array_equal(alone.sequences[0, 5:], found.sequences[1, 9:])


def test_a_row_ends_at_its_end_token_and_is_padded(pair):
    theirs, ours = pair
    ids = tokens(3, 6, seed=3)
    free = np.asarray(ours.generate(ids, max_new_tokens=12, eos_token_id=()).sequences)
    ends = [int(free[0, 8]), int(free[1, 10])]
    expected = torch_generate(theirs, ids, max_new_tokens=12, eos_token_id=ends, pad_token_id=5)
    found = ours.generate(ids, max_new_tokens=12, eos_token_id=ends, pad_token_id=5)
    np.testing.assert_array_equal(found.sequences, expected)
    assert found.lengths[0] <= 3
    rest = np.asarray(found.sequences)[0, 6 + int(found.lengths[0]) :]
    assert set(rest.tolist()) <= {5}


def test_generation_stops_when_all_rows_have_ended(pair):
    _, ours = pair
    ids = tokens(1, 6)
    first = int(ours.generate(ids, max_new_tokens=1, eos_token_id=()).sequences[0, -1])
    found = ours.generate(ids, max_new_tokens=500, eos_token_id=first)
    assert found.sequences.shape == (1, 7)


def test_the_configs_end_token_is_the_default(pair):
    _, ours = pair
    ids = tokens(1, 6)
    first = int(ours.generate(ids, max_new_tokens=1, eos_token_id=()).sequences[0, -1])
    config = ours.config.replace(hf_extra={"eos_token_id": first})
    other = DecoderForCausalLM(config)
    nnx.update(other, nnx.state(ours))
    assert other.generate(ids, max_new_tokens=5).lengths.tolist() == [1]


def test_nearby_lengths_share_one_compilation(pair):
    _, ours = pair
    before = generation_loop.cached._cache_size()
    for length, new in ((17, 17), (20, 25), (31, 32)):
        ours.generate(tokens(2, length), max_new_tokens=new, eos_token_id=())
    assert generation_loop.cached._cache_size() == before + 1


def test_sampling_follows_the_seed_and_the_filters(pair):
    _, ours = pair
    ids = tokens(2, 8)
    options = {"max_new_tokens": 16, "eos_token_id": (), "temperature": 2.0}

    def draw(seed, **more):
        return np.asarray(ours.generate(ids, **options, **more, rng=seed).sequences)

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()
    greedy = ours.generate(ids, max_new_tokens=16, eos_token_id=()).sequences
    np.testing.assert_array_equal(draw(3, top_k=1), greedy)
    np.testing.assert_array_equal(draw(3, top_p=1e-6), greedy)
    np.testing.assert_array_equal(draw(nnx.Rngs(5)), draw(nnx.Rngs(5)))
    np.testing.assert_array_equal(
        ours.generate(ids, max_new_tokens=16, eos_token_id=(), temperature=0.0).sequences, greedy
    )


def test_filters_keep_what_transformers_keeps():
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 2
    for top_k, top_p in ((5, 1.0), (0, 0.7), (10, 0.5), (50, 0.99)):
        expected = torch.tensor(logits)
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        found = filter_logits(jnp.asarray(logits), top_k=jnp.int32(top_k), top_p=jnp.float32(top_p))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected.numpy()))


def test_sharded_generation_gives_the_same_tokens(pair):
    _, ours = pair
    ids = tokens(2, 8)
    expected = ours.generate(ids, max_new_tokens=6, eos_token_id=()).sequences
    config = ours.config.replace(sharding_axis_dims=(1, 2, 2, 2))
    sharded = DecoderForCausalLM(config)
    nnx.update(sharded, jax.device_get(nnx.state(ours)))
    found = sharded.shard_model().generate(ids, max_new_tokens=6, eos_token_id=()).sequences
    np.testing.assert_array_equal(found, expected)


def test_a_model_without_a_cache_generates_the_same_tokens(pair):
    _, ours = pair

    class Plain(DecoderForCausalLM):
        def __call__(self, input_ids, attention_mask=None, **kwargs):
            return super().__call__(input_ids, attention_mask)

    plain = Plain(ours.config)
    nnx.update(plain, nnx.state(ours))
    assert not plain.takes_cache
    ids = tokens(2, 8)
    np.testing.assert_array_equal(
        plain.generate(ids, max_new_tokens=6, eos_token_id=()).sequences,
        ours.generate(ids, max_new_tokens=6, eos_token_id=()).sequences,
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input_ids": np.zeros((0, 3), int)}, "input_ids"),
        ({"input_ids": np.zeros((1, 3))}, "integers"),
        ({"attention_mask": np.array([[1, 1, 0]])}, "on the left only"),
        ({"attention_mask": np.array([[1, 0, 1]])}, r"rows: \[0\]"),
        ({"attention_mask": np.ones((1, 4))}, "shape"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_wrong_arguments_are_named(pair, changes, said):
    arguments = {"input_ids": np.array([[3, 4, 5]]), "max_new_tokens": 2, **changes}
    with pytest.raises(ArgumentError, match=said):
        pair[1].generate(**arguments)


def test_cache_sizes_are_checked():
    model = DecoderForCausalLM(
        DecoderConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    with pytest.raises(ArgumentError, match="max_length"):
        model.init_operations_cache(1, 0)
    cache = model.init_operations_cache(batch_size=1, max_length=4, starts=jnp.array([0]))
    assert cache.keys.shape == (1, 1, 4, 1, 8)
    assert model.can_generate()
