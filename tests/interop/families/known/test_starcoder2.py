"""The family `starcoder2`."""

import pytest

from cairn import ConfigError, DecoderConfig
from cairn.interop.families.gguf_writing import gguf_model
from tests.interop.families.matrix import SIZES, FamilyTests

MODEL_TYPE = "starcoder2"
CONFIGS = {
    "biases": {},
    "window": {"sliding_window": 9, "tie_word_embeddings": False},
    "plain": {"use_bias": False, "hidden_act": "gelu", "norm_epsilon": 1e-3},
}


class TestStarcoder2(FamilyTests):
    pass


def read(**keys):
    return DecoderConfig.from_hf({**SIZES, "head_dim": 8, "model_type": MODEL_TYPE, **keys})


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"mlp_type": "gated"}, "mlp_type='gated'"),
        ({"norm_type": "rms_norm"}, "norm_type='rms_norm'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types=.*nothing reads it"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 .nothing reads it"),
    ],
)
def test_what_transformers_does_not_read_is_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        read(**keys)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"use_bias": False}, r"attention_bias=False \(it would be True\)"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' \(it would be 'gelu_tanh'\)"),
        ({"sliding_window": 9}, r"sliding_window=9 below max_position"),
        ({"head_dim": 12}, r"head_dim=12 \(only heads"),
    ],
)
def test_a_gguf_file_of_what_llama_cpp_has_built_in_otherwise_is_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        gguf_model(read(**keys), {"token_embd.weight": (99, 32)})
