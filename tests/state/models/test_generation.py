"""Generation: the tokens of transformers, padding, ends, sampling, compilations."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.extend.core import jaxprs_in_params
from transformers import LlamaForCausalLM

from cairn import ArgumentError, ConversionError, DecoderConfig, DecoderForCausalLM
from tests.faults.report import is_long
from tests.state.compilations import compilations
from tests.state.forward import logits_of, outputs_of
from tests.state.hf_models import save, tiny_llama, tokens
from tests.state.my_model import MyModel, MyModelConfig, my_model
from tests.state.seams import Stop, checked_sampling, filter_logits, generation_loop, sample


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    theirs = tiny_llama(tie_word_embeddings=True)
    folder = save(theirs, tmp_path_factory.mktemp("generation"))
    return theirs, DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)


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
    ids = tokens(3, 9)
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    expected = torch_generate(theirs, ids, mask, max_new_tokens=8, eos_token_id=[], pad_token_id=0)
    found = ours.generate(ids, mask, max_new_tokens=8, eos_token_id=())
    np.testing.assert_array_equal(found.sequences, expected)
    alone = ours.generate(ids[1:2, 4:], max_new_tokens=8, eos_token_id=())
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


def test_end_tokens_of_the_generation_config_come_before_those_of_the_config(pair, tmp_path):
    theirs = pair[0]
    ids = tokens(3, 6, seed=3)
    free = torch_generate(theirs, ids, max_new_tokens=12, eos_token_id=[], pad_token_id=5)
    save(theirs, tmp_path)
    ends = [95, int(free[0, 8])]
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": ends, "pad_token_id": 5}))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.eos_token_id == 2
    expected = torch_generate(theirs, ids, max_new_tokens=12)
    ours = DecoderForCausalLM.from_pretrained(tmp_path)
    found = ours.generate(ids, max_new_tokens=12)
    np.testing.assert_array_equal(found.sequences, expected)
    assert found.lengths[0] <= 3
    ours.to_state().save_state(tmp_path / "run", step=1, wait=True, verbose=False)
    loaded = DecoderForCausalLM.from_pretrained(tmp_path / "run")
    np.testing.assert_array_equal(loaded.generate(ids, max_new_tokens=12).sequences, expected)
    file.write_text("[]")
    with pytest.raises(ConversionError, match=r"generation_config.json: expected a JSON object"):
        DecoderForCausalLM.from_pretrained(tmp_path).generate(ids)


def test_a_seed_is_any_integer_and_an_old_key_is_a_key(pair):
    ids = tokens(1, 6)
    options = {"max_new_tokens": 8, "eos_token_id": (), "temperature": 3.0}
    sampled = [
        pair[1].generate(ids, **options, rng=rng).sequences.tolist()
        for rng in (3, np.int64(3), jnp.int32(3), jax.random.key(3), jax.random.PRNGKey(3))
    ]
    assert all(tokens == sampled[0] for tokens in sampled)


def test_a_second_call_and_nearby_lengths_compile_nothing(pair):
    _, ours = pair
    with compilations() as first:
        ours.generate(tokens(2, 17), max_new_tokens=17, eos_token_id=())
    assert first
    before = generation_loop.cached._cache_size()
    with compilations() as later:
        for length, new in ((17, 17), (20, 25), (31, 32)):
            ours.generate(tokens(2, length), max_new_tokens=new, eos_token_id=())
    assert later == []
    assert generation_loop.cached._cache_size() == before


def test_sampling_follows_the_seed_and_the_filters(pair):
    _, ours = pair
    ids = tokens(3, 8)
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


def test_a_rows_draws_do_not_depend_on_padding_or_other_rows(pair):
    _, ours = pair
    ids = tokens(3, 8)
    options = {"max_new_tokens": 12, "eos_token_id": (), "temperature": 1.5, "rng": 7}
    alone = np.asarray(ours.generate(ids[:1], **options).sequences)[0, 8:]
    together = np.asarray(ours.generate(ids, **options).sequences)[0, 8:]
    np.testing.assert_array_equal(together, alone)
    wide = np.pad(ids, ((0, 0), (20, 0)))
    padded = ours.generate(wide, wide != 0, **options).sequences
    np.testing.assert_array_equal(np.asarray(padded)[0, 28:], alone)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (10, 0.5), (50, 0.99)])
def test_filtered_distributions_equal_transformers(temperature, top_k, top_p):
    from transformers.generation import logits_process

    logits = np.random.default_rng(0).normal(size=(64, 200)).astype(np.float32) * 3
    theirs = logits_process.TemperatureLogitsWarper(temperature)(None, torch.tensor(logits))
    if top_k:
        theirs = logits_process.TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = logits_process.TopPLogitsWarper(top_p)(None, theirs)
    ours = filter_logits(
        jnp.asarray(logits) / temperature, top_k=jnp.int32(top_k), top_p=jnp.float32(top_p)
    )
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs.numpy()))
    expected = torch.softmax(theirs, dim=-1).numpy()
    np.testing.assert_allclose(jax.nn.softmax(ours, axis=-1), expected, rtol=1e-5, atol=1e-8)


def test_draws_have_the_filtered_distribution():
    logits = np.random.default_rng(1).normal(size=(1, 8)).astype(np.float32)
    rows = jnp.broadcast_to(jnp.asarray(logits), (40_000, 8))
    top_k, top_p = jnp.int32(6), jnp.float32(0.95)
    drawn = sample(rows, jax.random.key(0), temperature=jnp.float32(0.8), top_k=top_k, top_p=top_p)
    kept = filter_logits(jnp.asarray(logits) / 0.8, top_k=top_k, top_p=top_p)
    expected = np.asarray(jax.nn.softmax(kept, axis=-1))[0]
    found = np.bincount(drawn, minlength=8) / len(rows)
    deviation = np.sqrt(expected * (1 - expected) / len(rows))
    assert 3 <= np.count_nonzero(expected) <= 6
    assert (np.abs(found - expected) <= 5 * deviation).all()


def test_a_very_small_temperature_takes_the_likeliest_token():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)) * 1e3
    drawn = checked_sampling(None, 1e-45, None, None).choose(logits, jax.random.key(0))
    np.testing.assert_array_equal(drawn, jnp.argmax(logits, axis=-1))


def test_sharded_generation_gives_the_same_tokens(pair):
    _, ours = pair
    ids = tokens(3, 8)
    expected = ours.generate(ids, max_new_tokens=6, eos_token_id=()).sequences
    config = ours.config.replace(sharding_axis_dims=(1, 2, 2, 2))
    sharded = DecoderForCausalLM(config)
    nnx.update(sharded, jax.device_get(nnx.state(ours)))
    found = sharded.shard_model().generate(ids, max_new_tokens=6, eos_token_id=()).sequences
    np.testing.assert_array_equal(found, expected)


def test_a_cache_filled_by_hand_gives_the_logits_of_the_whole(pair):
    _, ours = pair
    ids = jnp.asarray(tokens(1, 9))
    whole = logits_of(ours, ids)
    cache = ours.init_operations_cache(batch_size=1, max_length=2048, starts=jnp.array([0]))
    outputs = outputs_of(ours, ids[:, :5], cache=cache)
    found = [outputs.logits]
    for at in range(5, 9):
        inputs = ours.update_inputs_for_generation(outputs, ids[:, at], {"cache": cache})
        outputs = outputs_of(ours, inputs.pop("input_ids"), **inputs)
        found.append(outputs.logits)
    assert int(outputs.cache.length) == 9
    found = np.concatenate(found, axis=1)
    np.testing.assert_allclose(found, whole, atol=2e-5 * np.abs(whole).max())


def test_prepared_inputs_give_the_next_tokens_logits(pair):
    _, ours = pair
    ids = tokens(2, 6)
    mask = np.ones_like(ids)
    mask[1, :2] = 0
    inputs = ours.prepare_inputs_for_generation(jnp.asarray(ids), 8, jnp.asarray(mask))
    assert inputs["cache"].starts.tolist() == [0, 2]
    logits = jax.jit(lambda: ours(**inputs).logits)()
    assert logits.shape == (2, 1, 96)
    whole = logits_of(ours, ids[1:, 2:])[0, -1]
    np.testing.assert_allclose(logits[1, 0], whole, atol=2e-5 * np.abs(whole).max())


def test_a_full_cache_takes_no_more_tokens(pair):
    _, ours = pair
    cache = ours.init_operations_cache(1, 4)
    ids = jnp.asarray(tokens(1, 3))
    cache = outputs_of(ours, ids, cache=cache).cache
    with pytest.raises(ArgumentError, match="at most 4 tokens, its max_length; found 3 more after"):
        ours(ids, cache=cache)


def test_a_scanned_model_generates_the_same_and_stacks_its_layers_once(pair):
    _, ours = pair
    scanned = nnx.eval_shape(
        lambda: DecoderForCausalLM(ours.config.replace(scan_layers=True, remat=True))
    )
    nnx.update(scanned, nnx.state(ours))
    ids = tokens(3, 8)
    np.testing.assert_array_equal(
        scanned.generate(ids, max_new_tokens=6, eos_token_id=()).sequences,
        ours.generate(ids, max_new_tokens=6, eos_token_id=()).sequences,
    )
    rest = {
        "stop": Stop(jnp.zeros((0,), jnp.int32), jnp.int32(0)),
        "rules": None,
        "sampling": checked_sampling(None, None, None, None),
        "key": jax.random.key(0),
    }
    graphdef, state = nnx.split(scanned)
    traced = generation_loop.cached.trace(
        graphdef, state, ids, np.ones_like(ids, bool), jnp.int32(4), rest, room=16
    )
    stacked = (2, *ours.params["model"]["layers"][0]["mlp"]["up_proj"]["kernel"].shape)
    assert made_in(traced.jaxpr.jaxpr, stacked, inside=None)
    assert not made_in(traced.jaxpr.jaxpr, stacked, inside="while")


def made_in(jaxpr, shape, inside):
    """Whether arrays of this shape are made of others in a jaxpr, or only in its loops."""
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        shapes = [variable.aval.shape for variable in equation.invars]
        made = [variable.aval.shape for variable in equation.outvars]
        if inside is None and not inner and shape in made and shape not in shapes:
            return True
        below = None if equation.primitive.name == inside else inside
        if any(made_in(each, shape, below) for each in inner):
            return True
    return False


def test_more_than_the_model_can_take_is_refused_and_changes_nothing(pair):
    _, ours = pair
    short = nnx.eval_shape(
        lambda: DecoderForCausalLM(ours.config.replace(max_position_embeddings=12))
    )
    nnx.update(short, nnx.state(ours))
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(short)))
    ids = np.pad(tokens(2, 8), ((0, 0), (5, 0)))
    expected = (
        r"max_new_tokens: expected prompt \+ max_new_tokens to be at most the model's "
        r"max_position_embeddings, 12; found 8 \+ 5 = 13; ask for at most 4 new tokens"
    )
    with pytest.raises(ArgumentError, match=expected):
        short.generate(ids, ids != 0, max_new_tokens=5)
    with pytest.raises(ArgumentError, match="shorten the prompt"):
        short.generate(tokens(1, 12), max_new_tokens=1)
    after = nnx.to_pure_dict(nnx.state(short))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert short.generate(ids, ids != 0, max_new_tokens=4, eos_token_id=()).lengths.tolist() == [
        4,
        4,
    ]


def check_greedy(model, found, prompt):
    """Each new token is the likeliest one of a forward pass over all the tokens before it."""
    sequences = np.asarray(found.sequences)
    logits = logits_of(model, sequences)[:, prompt - 1 : -1]
    np.testing.assert_array_equal(sequences[:, prompt:], logits.argmax(axis=-1))


def test_a_users_own_model_generates():
    model = my_model()
    ids = tokens(3, 5, vocabulary=256)
    found = model.generate(ids, max_new_tokens=7)
    assert found.sequences.shape == (3, 12)
    check_greedy(model, found, prompt=5)
    sharded = my_model().shard_model().generate(ids, max_new_tokens=7)
    np.testing.assert_array_equal(sharded.sequences, found.sequences)


@pytest.mark.parametrize(
    ("method", "scan"), [("nf4", True), (None, False)] if is_long() else [("nf4", True)]
)
def test_an_adapted_model_generates(pair, method, scan):
    model = nnx.eval_shape(lambda: DecoderForCausalLM(pair[1].config.replace(scan_layers=scan)))
    nnx.update(model, nnx.state(pair[1]))
    if method is not None:
        model.quantize(method, 16)
    model.apply_lora_to_layers(lora_rank=4, lora_alpha=8, lora_pattern=".*_proj")
    keys = nnx.Rngs(0)
    adapters = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda x: x + jax.random.normal(keys(), x.shape), adapters))
    ids = tokens(3, 6)
    found = model.generate(ids, max_new_tokens=5, eos_token_id=())
    check_greedy(model, found, prompt=6)
    plain = pair[1].generate(ids, max_new_tokens=5, eos_token_id=())
    assert (np.asarray(found.sequences) != np.asarray(plain.sequences)).any()


def test_generation_drops_nothing_out_and_leaves_the_module_alone():
    class Noisy(MyModel):
        def __init__(self, config, **settings):
            super().__init__(config, **settings)
            self.noise = nnx.Dropout(0.5, rngs=settings["rngs"])

    noisy = Noisy(MyModelConfig(), rngs=nnx.Rngs(0))
    ids = tokens(2, 5, vocabulary=256)
    expected = my_model().generate(ids, max_new_tokens=6).sequences
    np.testing.assert_array_equal(noisy.generate(ids, max_new_tokens=6).sequences, expected)
    assert not noisy.noise.deterministic
    assert int(noisy.noise.rngs.count[...]) == 0


def test_a_forward_pass_without_tokens_cannot_generate():
    class Blind(MyModel):
        def __call__(self, pixels):
            return pixels

    model = Blind(MyModelConfig(), rngs=nnx.Rngs(0))
    assert not model.can_generate()
    with pytest.raises(ArgumentError, match=r"Blind\.generate: expected a forward pass"):
        model.generate(tokens(1, 3))


def test_a_model_without_a_cache_generates_the_same_tokens(pair):
    _, ours = pair

    class Plain(DecoderForCausalLM):
        def __call__(self, input_ids, attention_mask=None, **kwargs):
            return super().__call__(input_ids, attention_mask)

    plain = Plain(ours.config)
    nnx.update(plain, nnx.state(ours))
    assert not plain.takes_cache
    ids = tokens(3, 8)
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
        ({"attention_mask": np.array([[0.0, -1e9, 1.0]])}, "zeros and ones"),
        ({"attention_mask": np.array([[0, 0, 0]])}, "on the left only"),
        ({"input_ids": np.array([[3, 96]])}, "token ids from 0 to 95; found ids from 3 to 96"),
        ({"input_ids": np.array([[-1, 5]])}, "token ids from 0 to 95"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected an integer"),
        ({"top_k": 2.0}, "top_k: expected an integer"),
        ({"temperature": float("nan")}, "temperature"),
        ({"do_sample": False, "top_p": 0.9}, "do_sample=False: .*found top_p=0.9"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=True"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": "hot"}, "temperature: expected a number; found 'hot'"),
        ({"eos_token_id": 2.5}, "eos_token_id: expected integers; found .*2.5"),
        ({"eos_token_id": [[1, 2]]}, "eos_token_id: expected integers"),
        ({"pad_token_id": "0"}, "pad_token_id: expected integers; found '0'"),
        ({"rng": 1.5}, "rng: expected one JAX key, a seed or nnx.Rngs; found 1.5"),
        ({"rng": jax.random.split(jax.random.key(0))}, "rng: expected one JAX key"),
        ({"input_ids": [[3, 4], [5]]}, "rows of one length.*pad the shorter ones on the left"),
    ],
)
def test_wrong_arguments_are_named(pair, changes, said):
    arguments = {"input_ids": np.array([[3, 4, 5]]), "max_new_tokens": 2, **changes}
    with pytest.raises(ArgumentError, match=said):
        pair[1].generate(**arguments)


def test_neutral_values_do_not_contradict_greedy_choice(pair):
    prompt = np.array([[3, 4, 5]])
    options = {"max_new_tokens": 6, "eos_token_id": ()}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    greedy = pair[1].generate(prompt, **options)
    again = pair[1].generate(prompt, **options, do_sample=False, **neutral)
    assert np.array_equal(again.sequences, greedy.sequences)


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
    for starts in (jnp.array([4]), jnp.array([-1]), jnp.array([0, 0]), jnp.array([0.5])):
        with pytest.raises(ArgumentError, match="starts: expected integers from 0 to 3"):
            model.init_operations_cache(batch_size=1, max_length=4, starts=starts)
