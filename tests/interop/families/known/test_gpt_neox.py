"""The family `gpt_neox`."""

import pytest

from cairn import ConfigError, DecoderConfig
from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "gpt_neox"
WITHOUT = ("head_dim", "num_key_value_heads")
CONFIGS = {
    "parallel": {"hidden_size": 64},
    "one_after_the_other": {
        "hidden_size": 64,
        "use_parallel_residual": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
}

FILE = {
    "model_type": MODEL_TYPE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 99,
}


class TestGPTNeoX(FamilyTests):
    pass


@pytest.mark.parametrize(
    "said",
    [
        {"rotary_emb_base": 5000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000}},
        {"rotary_emb_base": 5000, "rope_theta": 5000},
    ],
)
def test_the_base_of_the_positions_is_read_where_transformers_reads_it(said):
    assert DecoderConfig.from_hf({**FILE, **said}).rope.theta == 5000.0


def test_a_base_that_transformers_passes_by_is_refused():
    with pytest.raises(ConfigError, match="rotary_emb_base"):
        DecoderConfig.from_hf({**FILE, "rope_theta": 5000})


@pytest.mark.parametrize(
    "said", [{"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}]
)
def test_two_bases_of_the_positions_are_refused(said):
    with pytest.raises(ConfigError, match="rope_theta"):
        DecoderConfig.from_hf({**FILE, "rotary_emb_base": 5000, **said})
