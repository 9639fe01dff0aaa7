"""The family `cohere2`."""

import pytest

from cairn import ConfigError, DecoderConfig
from cairn.interop.families.gguf_writing import gguf_model
from tests.interop.families.matrix import SIZES, FamilyTests

MODEL_TYPE = "cohere2"
WITHOUT = ("head_dim",)
EMBEDDING = {"token_embd.weight": (99, 32)}
CONFIGS = {
    "one_of_four": {"sliding_window": 9, "num_hidden_layers": 5, "logit_scale": 0.8},
    "biases_untied": {
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attention_bias": True,
        "tie_word_embeddings": False,
        "num_key_value_heads": None,
    },
    "linear": {
        "sliding_window": 9,
        "layer_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
    },
}


class TestCohere2(FamilyTests):
    pass


def read(**keys):
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    return DecoderConfig.from_hf({**sizes, "model_type": MODEL_TYPE, **keys})


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"head_dim": 12}, "expected 8, which transformers takes whatever the file says"),
        ({"rotary_pct": 0.5}, "rotary_pct=0.5 .all of each head turns"),
        ({"use_qk_norm": True}, "use_qk_norm=True .nothing reads it"),
        ({"use_parallel_block": False}, "use_parallel_block=False .attention and MLP"),
        ({"order_of_interleaved_layers": "global_attn_first"}, "windows are first"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_transformers_does_not_read_or_we_do_not_do_is_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        read(**keys)


def test_layers_without_a_window_have_no_rotary_positions():
    assert read(num_hidden_layers=8).layers_without_rope == (3, 7)
    assert read(sliding_window_pattern=2).layers_without_rope == (1,)


@pytest.mark.parametrize(
    "keys", [{"sliding_window_pattern": 2}, {"attention_bias": True}, {"logit_scale": 0.0}]
)
def test_a_gguf_file_of_what_llama_cpp_has_built_in_otherwise_is_refused(keys):
    with pytest.raises(ConfigError):
        gguf_model(read(**keys), EMBEDDING)


def test_a_gguf_file_has_no_head_of_its_own():
    untied = read(tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"found output\.weight"):
        gguf_model(untied, {**EMBEDDING, "output.weight": (99, 32)})
