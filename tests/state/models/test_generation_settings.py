"""What generation_config.json says of generation, and what a call says over it.

`CAIRN_FAULTS=long` generates with each setting alone, too.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM
from transformers.generation import logits_process

from cairn import ArgumentError, DecoderConfig, DecoderForCausalLM
from tests.faults.report import is_long
from tests.state.compilations import compilations
from tests.state.forward import logits_of
from tests.state.hf_models import save, tiny_llama, tokens
from tests.state.seams import (
    NO_TOKEN,
    checked_rules,
    checked_sampling,
    filter_logits,
    merged_settings,
)

IDS = tokens(3, 7, seed=3)
NEW = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tiny_llama(tie_word_embeddings=True), tmp_path_factory.mktemp("settings"))


@pytest.fixture(scope="module")
def ours(folder):
    return DecoderForCausalLM.from_pretrained(folder, auto_shard_model=False)


@pytest.fixture(scope="module")
def free(ours):
    """What comes without settings; no row ends."""
    made = ours.generate(IDS, max_new_tokens=NEW, eos_token_id=(), generation_config={})
    return np.asarray(made.sequences)


def with_settings(model, settings):
    """The same model with a generation_config.json."""
    files = {"generation_config.json": json.dumps(settings).encode()}
    model = nnx.clone(model)
    model.config = model.config.replace(tokenizer_files=files)
    return model


their_model = functools.cache(LlamaForCausalLM.from_pretrained)


def theirs_with(folder, settings, **generate):
    """What transformers makes of the folder with these settings in its file."""
    model = their_model(folder)
    model.generation_config = GenerationConfig.from_dict(dict(settings))
    with torch.no_grad():
        ids = torch.tensor(generate.pop("ids", IDS)).long()
        mask = torch.tensor(generate.pop("mask", np.ones(ids.shape))).long()
        return model.generate(ids, attention_mask=mask, **generate).numpy()


def in_folder(folder, path, settings, config=None):
    """A copy of the folder with this generation_config.json (None for no file) and config.json."""
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "generation_config.json").unlink()
    if settings is not None:
        (path / "generation_config.json").write_text(json.dumps(settings))
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**data, **(config or {})}))
    return path


def cases(free):
    """Settings that each change what is generated."""
    ends = [int(free[0, 9]), int(free[1, 11]), int(free[2, 8])]
    pair = [int(free[0, 8]), int(free[0, 9])]
    return {
        "penalty": {"repetition_penalty": 1.8, "max_new_tokens": NEW},
        "reward": {"repetition_penalty": 0.6, "max_new_tokens": NEW},
        "ngrams of 1": {"no_repeat_ngram_size": 1, "max_new_tokens": NEW},
        "ngrams of 2": {"no_repeat_ngram_size": 2, "max_new_tokens": NEW},
        "ngrams of 3": {"no_repeat_ngram_size": 3, "max_new_tokens": NEW},
        "ends": {"eos_token_id": ends, "pad_token_id": 5, "max_new_tokens": NEW},
        "at least": {
            "eos_token_id": ends,
            "pad_token_id": 5,
            "min_new_tokens": 6,
            "max_new_tokens": NEW,
        },
        "lengths": {"eos_token_id": ends, "pad_token_id": 5, "min_length": 12, "max_length": 20},
        "both lengths": {
            "eos_token_id": ends,
            "pad_token_id": 5,
            "min_length": 30,
            "min_new_tokens": 3,
            "max_length": 9,
            "max_new_tokens": 15,
        },
        "bad words": {
            "bad_words_ids": [[int(free[1, 7])], pair, [3, 4, int(free[2, 9])], [ends[0]]],
            "eos_token_id": ends[0],
            "pad_token_id": 5,
            "max_new_tokens": NEW,
        },
        "biases": {
            "sequence_bias": [[[int(free[1, 7])], -4.5], [pair, -100.0], [[11], 3.25]],
            "max_new_tokens": NEW,
        },
        "suppressed": {
            "suppress_tokens": [int(free[0, 10]), int(free[1, 8])],
            "begin_suppress_tokens": [int(free[0, 7]), int(free[2, 7])],
            "max_new_tokens": NEW,
        },
        "last": {"forced_eos_token_id": 17, "remove_invalid_values": True, "max_new_tokens": 9},
        "all": {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [[int(free[1, 7])], pair],
            "sequence_bias": [[[int(free[0, 7])], -2.0]],
            "suppress_tokens": [int(free[2, 8])],
            "begin_suppress_tokens": [int(free[2, 7])],
            "min_new_tokens": 4,
            "eos_token_id": ends,
            "pad_token_id": 5,
            "forced_eos_token_id": ends,
            "max_new_tokens": NEW,
        },
    }


IN_ALL = (
    "penalty",
    "reward",
    "ends",
    "ngrams of 2",
    "ngrams of 3",
    "at least",
    "bad words",
    "biases",
    "suppressed",
)
"""Cases whose settings are among those of "all", and alone in the long run."""


def test_greedy_tokens_with_every_setting_equal_transformers(folder, ours, free):
    for name, changes in cases(free).items():
        if name in IN_ALL and not is_long():
            continue
        settings = {"eos_token_id": [], "pad_token_id": 0, **changes}
        expected = theirs_with(folder, settings)
        found = np.asarray(with_settings(ours, settings).generate(IDS).sequences)
        np.testing.assert_array_equal(found, expected, err_msg=name)
        assert found.shape != free.shape or (found != free).any(), name
        if name in ("all", "both lengths"):
            as_arguments = ours.generate(IDS, **settings, generation_config={}).sequences
            np.testing.assert_array_equal(as_arguments, expected, err_msg=name)


def test_padding_is_no_token_of_a_row(folder, ours, free):
    settings = {**cases(free)["all"], "no_repeat_ngram_size": 2, "min_new_tokens": 6}
    mask = np.ones_like(IDS)
    mask[1, :3] = 0
    padded = np.where(mask, IDS, 0)
    expected = theirs_with(folder, settings, ids=padded, mask=mask)
    found = with_settings(ours, settings).generate(padded, mask)
    np.testing.assert_array_equal(found.sequences, expected)
    other = with_settings(ours, settings).generate(np.where(mask, IDS, IDS[0, 0]), mask)
    np.testing.assert_array_equal(np.asarray(other.sequences)[:, 7:], expected[:, 7:])


def test_a_first_token_is_forced_after_a_prompt_of_one(folder, ours):
    settings = {
        "forced_bos_token_id": 9,
        "begin_suppress_tokens": [40],
        "max_new_tokens": 5,
        "eos_token_id": [],
        "pad_token_id": 0,
    }
    for width in (1, 2):
        one = IDS[:, :width]
        made = ours.generate(one, max_new_tokens=5, eos_token_id=(), generation_config={})
        free = np.asarray(made.sequences)
        settings["begin_suppress_tokens"] = free[:, -4 if width == 1 else -5].tolist()
        expected = theirs_with(folder, settings, ids=one)
        found = with_settings(ours, settings).generate(one).sequences
        np.testing.assert_array_equal(found, expected)
        assert (expected[:, width] == 9).all() == (width == 1)


def test_a_model_without_a_cache_follows_the_same_settings(ours, free):
    class Plain(DecoderForCausalLM):
        def __call__(self, input_ids, attention_mask=None, **kwargs):
            return super().__call__(input_ids, attention_mask)

    plain = Plain(ours.config)
    nnx.update(plain, nnx.state(ours))
    settings = {**cases(free)["all"], "max_new_tokens": 6}
    np.testing.assert_array_equal(
        with_settings(plain, settings).generate(IDS).sequences,
        with_settings(ours, settings).generate(IDS).sequences,
    )


def test_sharded_weights_follow_the_same_settings(folder, ours, free):
    settings = {**cases(free)["all"], "max_new_tokens": 6}
    sharded = DecoderForCausalLM.from_pretrained(folder, sharding_axis_dims=(1, 2, 2, 2))
    np.testing.assert_array_equal(
        with_settings(sharded, settings).generate(IDS).sequences,
        with_settings(ours, settings).generate(IDS).sequences,
    )


def test_other_values_of_the_same_settings_compile_nothing(ours):
    model = with_settings(ours, {"repetition_penalty": 1.3, "bad_words_ids": [[3], [4, 5]]})
    model.generate(IDS)
    with compilations() as later:
        model.generate(IDS, repetition_penalty=1.9, bad_words_ids=[[7, 8], [9]])
        model.generate(IDS, max_new_tokens=30)
    assert later == []


def test_arguments_of_the_call_win_over_the_file(ours, free):
    file = cases(free)["all"]
    model = with_settings(ours, file)
    neutral = {
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": (),
        "sequence_bias": (),
        "suppress_tokens": (),
        "begin_suppress_tokens": (),
        "min_new_tokens": 0,
        "eos_token_id": (),
        "forced_eos_token_id": (),
    }
    np.testing.assert_array_equal(model.generate(IDS, **neutral).sequences, free)
    assert model.generate(IDS, **neutral, max_new_tokens=3).lengths.tolist() == [3, 3, 3]
    assert model.generate(IDS, **neutral, max_length=9).lengths.tolist() == [2, 2, 2]
    whole = model.generate(IDS, generation_config={}, max_new_tokens=NEW, eos_token_id=())
    np.testing.assert_array_equal(whole.sequences, free)


def settled(file, **call):
    files = {"generation_config.json": json.dumps(file).encode()}
    return merged_settings(DecoderConfig(tokenizer_files=files), None, call)


def test_a_file_that_samples_does_and_a_call_says_whether_and_how(ours):
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    model = with_settings(ours, file)
    drawn = [np.asarray(model.generate(IDS, rng=seed).sequences) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
    greedy = ours.generate(IDS, generation_config={}).sequences
    for call in ({"do_sample": False}, {"temperature": 0}, {"top_k": 1}, {"min_p": 1.0}):
        np.testing.assert_array_equal(model.generate(IDS, **call).sequences, greedy)
    assert settled(file)["temperature"] == 0.6
    assert settled(file, top_p=0.5) == settled({**file, "top_p": 0.5})
    # As in transformers: what a file says of sampling is for those who sample.
    idle = {"temperature": 0.6, "top_p": 0.9}
    np.testing.assert_array_equal(with_settings(ours, idle).generate(IDS).sequences, greedy)
    assert settled(idle, do_sample=True)["temperature"] == 0.6
    assert settled({"temperature": 0.6}, top_k=3)["temperature"] == 0.6
    with pytest.raises(ArgumentError, match="do_sample: expected True or False; found 'yes'"):
        with_settings(ours, {"do_sample": "yes"}).generate(IDS)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_filters_as_in_transformers(min_p):
    logits = np.random.default_rng(0).normal(size=(64, 200)).astype(np.float32) * 3
    theirs = logits_process.TopKLogitsWarper(50)(None, torch.tensor(logits))
    theirs = logits_process.MinPLogitsWarper(min_p)(None, theirs)
    sampling = checked_sampling(True, None, None, 50, min_p)
    drawn = {
        int(token)
        for seed in range(40)
        for token in sampling.choose(jnp.asarray(logits[:1]), jax.random.key(seed))
    }
    assert drawn <= set(torch.isfinite(theirs[0]).nonzero().flatten().tolist())
    kept = filter_logits(jnp.asarray(logits), top_k=jnp.int32(50), top_p=jnp.float32(1))
    wide = np.where(logits - logits.max(-1, keepdims=True) >= np.log(min_p), kept, -np.inf)
    np.testing.assert_array_equal(np.isfinite(wide), np.isfinite(theirs.numpy()))


def test_rules_on_random_rows_equal_transformers():
    """Many rows and lengths at once, with what a row has not yet."""
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 6, (200, 12)).astype(np.int32)
    logits = rng.normal(size=(200, 8)).astype(np.float32)
    settings = {
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.7,
        "bad_words_ids": [[1, 2], [3], [0, 4, 5], [2, 2, 2, 2]],
        "sequence_bias": [[[5], 1.5], [[4, 1], -2.5]],
    }
    rules = checked_rules(settings, width=1, eos=(), vocabulary=8)
    for length in (1, 2, 3, 7, 12):
        ids, scores = torch.tensor(rows[:, :length]).long(), torch.tensor(logits)
        for processor in (
            logits_process.SequenceBiasLogitsProcessor(settings["sequence_bias"]),
            logits_process.RepetitionPenaltyLogitsProcessor(1.7),
            logits_process.NoRepeatNGramLogitsProcessor(3),
            logits_process.NoBadWordsLogitsProcessor(settings["bad_words_ids"]),
        ):
            scores = processor(ids, scores)
        sofar = np.full((200, 20), NO_TOKEN, np.int32)
        sofar[:, 4 : 4 + length] = rows[:, :length]
        found = jax.jit(rules.applied)(
            jnp.asarray(logits),
            jnp.asarray(sofar),
            jnp.int32(4 + length),
            step=jnp.int32(0),
            limit=jnp.int32(5),
            eos=jnp.zeros((0,), jnp.int32),
        )
        np.testing.assert_allclose(found, scores.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 4}, r"json num_beams=4: only 1 can be done"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5: only 1"),
        ({"stop_strings": ["a"]}, "stop_strings"),
        ({"exponential_decay_length_penalty": [5, 1.1]}, "exponential_decay"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"watermarking_config": {"bias": 2.0}}, "watermarking_config"),
        ({"do_sample": True, "typical_p": 0.9}, "typical_p=0.9: only 1.0"),
        (
            {"repetition_penality": 1.2},
            r"penality \(did you mean repetition_penalty\?\)",
        ),
        ({"repetition_penalty": 0}, "repetition_penalty: expected above 0"),
        ({"repetition_penalty": "high"}, "repetition_penalty: expected a number"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size: expected an integer"),
        ({"bad_words_ids": [3]}, "bad_words_ids: expected lists of token ids"),
        ({"bad_words_ids": [[]]}, "bad_words_ids: expected lists of token ids"),
        (
            {"bad_words_ids": [[96]]},
            r"bad_words_ids: .* from 0 to 95; found \[96\]",
        ),
        ({"sequence_bias": [3]}, "sequence_bias: expected pairs"),
        ({"sequence_bias": [[[3], float("nan")]]}, "sequence_bias: expected numbers"),
        ({"suppress_tokens": [-1]}, "suppress_tokens: expected token ids"),
        ({"forced_eos_token_id": 96}, "forced_eos_token_id"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_p": 1.5, "do_sample": True}, "min_p: expected from 0 to 1"),
        ({"max_length": 7}, "max_length: expected more than the prompt's 7 tokens"),
        ({"remove_invalid_values": 1}, "remove_invalid_values"),
    ],
)
def test_what_can_not_act_is_refused_by_name(ours, settings, said):
    with pytest.raises(ArgumentError, match=said):
        with_settings(ours, settings).generate(IDS)
    with pytest.raises(ArgumentError, match=said.replace("json ", "argument ")):
        ours.generate(IDS, generation_config={}, **settings)


def test_all_that_can_not_act_is_listed_at_once(ours):
    file = {"num_beams": 4, "penalty_alpha": 0.6, "use_cache": False, "bos_token_id": 1}
    with pytest.raises(ArgumentError) as refused:
        with_settings(ours, file).generate(IDS, colour="red", output_scores=True)
    assert refused.value.problems == (
        "argument colour: unknown",
        "argument output_scores: changes nothing here",
        "generation_config.json num_beams=4: only 1 can be done",
        "generation_config.json penalty_alpha=0.6: only 0 can be done",
    )
    assert with_settings(ours, file).generate(IDS, num_beams=1, penalty_alpha=0) is not None
    with pytest.raises(ArgumentError, match="generation_config: expected settings by name"):
        ours.generate(IDS, generation_config="greedy")


def test_what_transformers_writes_is_taken_as_it_is(folder, ours):
    written = json.loads((folder / "generation_config.json").read_text())
    assert written
    every = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()
    for settings in (written, every):
        found = with_settings(ours, settings).generate(IDS, max_new_tokens=4)
        assert found.sequences.shape == (3, 11)


def test_lengths_of_the_file_give_way_to_the_room_that_there_is(ours):
    config = ours.config.replace(max_position_embeddings=12)
    short = with_settings(ours, {"max_length": 4096})
    short.config = config.replace(tokenizer_files=short.config.tokenizer_files)
    assert short.generate(IDS, eos_token_id=()).lengths.tolist() == [5, 5, 5]
    with pytest.raises(ArgumentError, match="max_position_embeddings, 12; found 7"):
        short.generate(IDS, max_length=13)
    with pytest.raises(ArgumentError, match="shorten the prompt"):
        short.generate(tokens(1, 12))


def test_old_models_keep_settings_in_config_json(folder, tmp_path, free):
    for file in folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    data = json.loads((tmp_path / "config.json").read_text())
    penalty = {"repetition_penalty": 1.8, "max_new_tokens": NEW, "eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(data | {"repetition_penalty": 1.8}))
    model = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    expected = theirs_with(folder, {**penalty, "pad_token_id": 0})
    found = model.generate(IDS, max_new_tokens=NEW, eos_token_id=())
    np.testing.assert_array_equal(found.sequences, expected)
    (tmp_path / "config.json").write_text(json.dumps(data | {"num_beams": 5}))
    model = DecoderForCausalLM.from_pretrained(tmp_path, auto_shard_model=False)
    with pytest.raises(ArgumentError, match="num_beams=5"):
        model.generate(IDS)


def test_settings_of_config_json_go_along_too(folder, tmp_path):
    (tmp_path / "old").mkdir()
    settings = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "max_length": 16}
    tokens = {"eos_token_id": [2, 47], "pad_token_id": 1, "forced_eos_token_id": 9}
    path = in_folder(folder, tmp_path / "old", None, settings | tokens)
    model = DecoderForCausalLM.from_pretrained(path, auto_shard_model=False)
    model.save_pretrained(tmp_path / "saved")
    expected = np.asarray(model.generate(IDS).sequences)
    for theirs in (
        LlamaForCausalLM.from_pretrained(path),
        LlamaForCausalLM.from_pretrained(tmp_path / "saved"),
        model.to_pytorch(),
    ):
        with torch.no_grad():
            found = theirs.generate(torch.tensor(IDS).long()).numpy()
        np.testing.assert_array_equal(found, expected)


def test_settings_go_with_the_model_wherever_it_goes(ours, tmp_path):
    settings = {"repetition_penalty": 1.8, "eos_token_id": [2, 3], "pad_token_id": 2}
    model = with_settings(ours, settings)
    expected = np.asarray(model.generate(IDS).sequences)
    model.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors")
    again = DecoderForCausalLM.from_pretrained(tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    model.to_state().save_state(tmp_path / "run", wait=True, verbose=False)
    of_run = DecoderForCausalLM.from_pretrained(tmp_path / "run")
    for ours_again in (again, of_run):
        np.testing.assert_array_equal(ours_again.generate(IDS).sequences, expected)
    for torch_model in (theirs, model.to_pytorch()):
        with torch.no_grad():
            made = torch_model.generate(torch.tensor(IDS).long(), max_new_tokens=20)
        np.testing.assert_array_equal(made.numpy(), expected)


@pytest.mark.parametrize(
    ("file", "ends"),
    [
        ({"max_new_tokens": 12}, False),
        ({"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 3}, False),
        ({"max_new_tokens": 12, "eos_token_id": 59}, True),
        (None, True),
    ],
    ids=["no end", "null for an end", "no padding", "no file"],
)
def test_end_and_padding_tokens_are_those_of_the_file_where_there_is_one(
    folder, tmp_path, free, file, ends
):
    config = {"eos_token_id": [59, int(free[1, 11])], "pad_token_id": 3}
    path = in_folder(folder, tmp_path, file, config)
    theirs = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = theirs.generate(torch.tensor(IDS).long(), max_new_tokens=12).numpy()
    model = DecoderForCausalLM.from_pretrained(path, auto_shard_model=False)
    found = np.asarray(model.generate(IDS, max_new_tokens=12).sequences)
    np.testing.assert_array_equal(found, expected)
    assert (found == free[:, : found.shape[1]]).all() != ends
    without = np.asarray(model.generate(IDS, max_new_tokens=12, generation_config={}).sequences)
    assert 3 in without[:, 7:]  # those of the config, where there are no settings


def test_a_file_that_samples_draws_from_the_likeliest_fifty_as_in_transformers(ours):
    rows = np.repeat(IDS[:1], 512, axis=0)

    def drawn(file, **call):
        made = with_settings(ours, file).generate(rows, max_new_tokens=1, **call)
        return set(np.asarray(made.sequences)[:, -1].tolist())

    hot = {"do_sample": True, "temperature": 100.0}
    with torch.no_grad():
        logits = torch.tensor(logits_of(ours, IDS[:1])[:, -1])
    likeliest = set(logits.topk(50).indices.flatten().tolist())
    assert drawn(hot) == drawn({**hot, "top_k": None}) == likeliest
    assert drawn({}, temperature=100.0) == likeliest
    assert drawn({}, temperature=100.0, generation_config=hot) == likeliest
    for everything in (drawn({**hot, "top_k": 0}), drawn(hot, top_k=0)):
        assert everything > likeliest
    assert drawn({}, temperature=100.0, generation_config={}) > likeliest


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"typical_p": 0.9}, "argument typical_p=0.9: only 1.0"),
        ({"eos_token_ids": [2]}, r"argument eos_token_ids \(did you mean eos_token_id\?\)"),
        ({"max_new_tokens": True}, "max_new_tokens: expected an integer, 1 or more; found True"),
        ({"no_repeat_ngram_size": True}, "no_repeat_ngram_size: expected an integer"),
        ({"top_k": True}, "top_k: expected an integer"),
        ({"top_k": 2**40}, "top_k: expected an integer"),
        ({"repetition_penalty": "1.8"}, "repetition_penalty: expected a number; found '1.8'"),
        ({"repetition_penalty": True}, "repetition_penalty: expected a number; found True"),
        ({"eos_token_id": [True, 5]}, "eos_token_id: expected integers; found True"),
        ({"eos_token_id": 2**40}, "eos_token_id: expected integers; found 1099511627776"),
        ({"pad_token_id": False}, "pad_token_id: expected integers; found False"),
        ({"suppress_tokens": [False]}, "suppress_tokens: expected integers; found False"),
        (
            {"bad_words_ids": [[4, True]]},
            r"bad_words_ids: expected lists.*\[\[4, True\]\]",
        ),
        (
            {"suppress_tokens": [4, 5], "forced_eos_token_id": [5]},
            r"forced_eos_token_id: .* not among suppress_tokens; found \[5\]",
        ),
    ],
)
def test_an_argument_that_would_do_nothing_or_another_thing_is_refused(ours, settings, said):
    with pytest.raises(ArgumentError, match=said):
        ours.generate(IDS, generation_config={}, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"is_assistant": True}, "is_assistant=True: only False can be done"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5: only None"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized': changes tokens"),
        ({"stop_token_ids": [2]}, r"json stop_token_ids \(did you mean .*\?\): unknown"),
    ],
)
def test_settings_of_a_file_that_would_change_tokens_are_refused(ours, settings, said):
    with pytest.raises(ArgumentError, match=said):
        with_settings(ours, settings).generate(IDS)
    kept = {"is_assistant": False, "cache_implementation": "static", "typical_p": 0.9}
    assert with_settings(ours, kept).generate(IDS, max_new_tokens=1).lengths.tolist() == [1, 1, 1]


def test_a_forced_first_token_that_is_never_chosen_is_refused(ours):
    with pytest.raises(ArgumentError, match="forced_bos_token_id: expected a token"):
        ours.generate(IDS[:, :1], forced_bos_token_id=9, suppress_tokens=[9])
    assert ours.generate(IDS, forced_bos_token_id=9, suppress_tokens=[9], max_new_tokens=1)
