"""Keys that published config.json files have beside those of their family.

A key is carried along only if the logits of `transformers` are the same with it and without it; one
that changes them is refused, with the number that it changes. `make test` compares what published
files say, all keys of a family at once; `make families` each by itself, and in every family those
that are carried along whatever the family is, all at once. `tests/field/` has what is refused.
"""

import numpy as np
import pytest
import torch
from jax import numpy as jnp
from transformers.activations import ACT2FN
from transformers.utils import logging

from cairn import DecoderConfig
from cairn.interop import registry
from cairn.interop.config.hf_keys import DROPOUTS, NEUTRAL_VALUES
from cairn.interop.families.family import get_family
from tests.interop.families.matrix import WHOLE
from tests.interop.families.test_config_fuzz import Theirs, bases, is_same
from tests.interop.seams import HARMLESS_KEYS, activation_from_hf
from tests.state.seams import ACTIVATION_FUNCTIONS

pytestmark = pytest.mark.filterwarnings("ignore:.*the decoder has none of it")

CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
PUBLISHED = {
    "falcon": {"ff_factor": 4},  # falcon-11B
    "gemma2": {"hidden_act": "gelu"},  # beside hidden_activation, which counts
    "gemma3_text": {"hidden_act": "gelu"},
    # gpt2-medium, gpt2-xl
    "gpt2": {"n_special": 0, "predict_special_tokens": True, "output_past": True},
    # GPT-NeoX-20B, dolly-v2
    "gpt_neox": {
        "attention_probs_dropout_prob": 0,
        "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.InstructionPipeline"}},
        "hidden_dropout_prob": 0,
    },
    # llama-7b, granite-8b-code, SmolLM
    "llama": {
        "attention_dropout": 0.1,
        "is_llama_config": True,
        "max_sequence_length": 2048,
        "rope_interleaved": False,
    },
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "mixtral": {"attention_bias": False, "mlp_bias": False},
    # Qwen2.5-0.5B and the distills of R1, Qwen2.5-7B-Instruct-1M
    "qwen2": {"dual_chunk_attention_config": CHUNKS, "use_mrope": False},
    # Qwen3-Coder-30B-A3B
    "qwen3_moe": {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
}
ROPES = {
    "default": {"rope_type": "default", "mrope_section": [1, 1, 1], "mrope_interleaved": True},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "finetuned": True,
    },
}
ODD = {
    **dict.fromkeys(HARMLESS_KEYS - {"attn_implementation"}, "odd"),  # which Theirs says
    **dict.fromkeys(DROPOUTS, 0.3),
    **dict.fromkeys(("do_sample", "early_stopping", "gradient_checkpointing"), True),
    **dict.fromkeys(("is_decoder", "output_attentions", "output_hidden_states"), True),
    **dict.fromkeys(("output_scores", "remove_invalid_values", "return_dict"), True),
    **dict.fromkeys(("return_dict_in_generate", "tf_legacy_loss", "torchscript"), True),
    **dict.fromkeys(("use_bfloat16", "use_cache"), True),
    **dict.fromkeys(("chunk_size_feed_forward", "num_labels"), 3),
    **{"dtype": "float32", "torch_dtype": "float32"},
    **{"id2label": {"0": "no", "1": "yes", "2": "odd"}, "label2id": {"no": 0, "yes": 1, "odd": 2}},
    **{"problem_type": "regression", "_odd": 1, "odd_token_id": 3},
    **{key: value for key, (value, _) in NEUTRAL_VALUES.items() if value is not None},
}


def read(data):
    """Our reading of a file, and what it was read from, as it is written."""
    ours = DecoderConfig.from_hf(data)
    written = ours.to_hf()
    assert DecoderConfig.from_hf(written) == ours
    return ours, written


def compare(data, keys):
    """Assert that keys change nothing here or in transformers, and that they are given back."""
    logging.set_verbosity_error()
    theirs = Theirs()
    expected, found = theirs.outcome(data), theirs.outcome({**data, **keys})
    assert expected[0] == "computes"
    assert is_same(expected, found)
    plain, (ours, written) = DecoderConfig.from_hf(data), read({**data, **keys})
    assert ours == plain
    dropped = {"dtype", "torch_dtype"}
    assert {key: written[key] for key in keys.keys() - dropped} == {
        key: keys[key] for key in keys.keys() - dropped
    }


def each(keys):
    return [{key: value} for key, value in keys.items()] if WHOLE else [keys]


@pytest.mark.parametrize(
    ("name", "keys"), [(name, keys) for name in PUBLISHED for keys in each(PUBLISHED[name])]
)
def test_a_key_that_changes_no_logits_is_carried_along(name, keys):
    compare(next(bases(name)), keys)


@pytest.mark.parametrize("kind", ROPES)
def test_keys_beside_a_rope_that_change_no_logits_are_carried_along(kind):
    logging.set_verbosity_error()
    data, theirs = next(bases("qwen2")), Theirs()
    rope = {**ROPES[kind], "rope_theta": 10000.0}
    inert = {"finetuned", "mrope_interleaved", "mrope_section"} & rope.keys()
    ours, written = read({**data, "rope_parameters": rope})
    assert {key: written["rope_parameters"][key] for key in inert} == {k: rope[k] for k in inert}
    plain = {key: value for key, value in rope.items() if key not in inert}
    assert ours == DecoderConfig.from_hf({**data, "rope_parameters": plain})
    expected = theirs.outcome({**data, "rope_parameters": plain})
    assert expected[0] == "computes"
    assert is_same(expected, theirs.outcome({**data, "rope_parameters": rope}))


if WHOLE:

    @pytest.mark.parametrize("name", registry.known_families())
    def test_what_is_carried_along_in_every_family_changes_no_logits(name):
        data = next(bases(name))
        read_by_it = get_family(name).known_keys - DROPOUTS
        compare(data, {key: value for key, value in ODD.items() if key not in read_by_it})


NAMES = ("gelu", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh")


@pytest.mark.parametrize("name", [*NAMES, "gelu_pytorch_tanh", "relu", "silu", "swish"])
def test_an_activation_is_what_transformers_has_under_its_name_and_keeps_it(name):
    values = np.linspace(-6.0, 6.0, 1001, dtype=np.float32)
    ours = ACTIVATION_FUNCTIONS[activation_from_hf(name, "x")](jnp.asarray(values))
    np.testing.assert_allclose(ours, ACT2FN[name](torch.tensor(values)).numpy(), atol=2e-6)
    for family in ("gpt_neox", "gpt2"):
        key = get_family(family).form.activation[0]
        assert read({**next(bases(family)), key: name})[1][key] == name


def test_another_activation_than_that_of_the_file_has_its_own_name():
    ours = DecoderConfig.from_hf({**next(bases("gpt_neox")), "hidden_act": "gelu_fast"})
    assert ours.replace(hidden_act="relu").to_hf()["hidden_act"] == "relu"
