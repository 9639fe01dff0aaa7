"""The family `olmo3`."""

import pytest

from cairn import ConfigError, DecoderConfig
from cairn.interop.families.gguf_writing import gguf_model
from tests.interop.families.matrix import SIZES, FamilyTests

MODEL_TYPE = "olmo3"
EMBEDDING = {"token_embd.weight": (99, 32)}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.2,
}
CONFIGS = {
    "stretched": {"sliding_window": 9, "num_hidden_layers": 5, "rope_scaling": YARN},
    "two_bases_tied": {
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


class TestOlmo3(FamilyTests):
    pass


def read(**keys):
    return DecoderConfig.from_hf({**SIZES, "head_dim": 8, "model_type": MODEL_TYPE, **keys})


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"rope_theta": 1e6}, "without a window alone"),
        ({"rope_local_base_freq": 1e4}, "rope_local_base_freq=10000.0 .nothing reads it"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "which transformers does not read"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scales nothing in this family"),
        ({"mlp_bias": True}, "mlp_bias=True .nothing reads it"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_transformers_does_not_read_or_reads_in_two_ways_is_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        read(**keys)


def test_each_kind_of_layers_has_its_base():
    bases = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = read(rope_parameters=bases)
    assert (config.rope.theta, config.window_rope.theta) == (1e6, 1e4)
    assert DecoderConfig.from_hf(config.to_hf()) == config


def test_three_layers_of_four_have_a_window():
    types = read(num_hidden_layers=8).layer_types
    assert [number for number, one in enumerate(types) if one == "full_attention"] == [3, 7]


@pytest.mark.parametrize(
    "keys",
    [
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
        {"rope_scaling": {**YARN, "attention_factor": 1.5}},
    ],
)
def test_a_gguf_file_of_what_llama_cpp_has_built_in_otherwise_is_refused(keys):
    with pytest.raises(ConfigError):
        gguf_model(read(**keys), EMBEDDING)


def test_a_gguf_file_of_the_published_models_is_written():
    stretched = {**YARN, "factor": 8.0, "attention_factor": 1.2079441541679836}
    shapes = {**EMBEDDING, "output.weight": (99, 32)}
    said = gguf_model(read(num_hidden_layers=8, rope_scaling=stretched), shapes).metadata
    assert said["olmo2.rope.scaling.factor"] == 8.0
