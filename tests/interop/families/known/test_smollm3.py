"""The family `smollm3`."""

import pytest

from cairn import ConfigError, DecoderConfig
from cairn.interop.config.decoder import FULL, WINDOW
from cairn.interop.families.gguf_writing import gguf_model
from tests.interop.families.matrix import SIZES, FamilyTests

MODEL_TYPE = "smollm3"
WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
CONFIGS = {
    "one_of_four": {"num_hidden_layers": 5},
    "windows": {**WINDOWED, "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    "windows_where_they_turn": {
        **WINDOWED,
        "attention_bias": True,
        "mlp_bias": True,
        "layer_types": [WINDOW, FULL, WINDOW],
        "no_rope_layers": [1, 1, 0, 1],
    },
    "sharpened": {
        "no_rope_layer_interval": 2,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
    },
    "still": {"no_rope_layer_interval": 1, "num_key_value_heads": None},
}


class TestSmolLM3(FamilyTests):
    pass


def read(**keys):
    return DecoderConfig.from_hf({**SIZES, "model_type": MODEL_TYPE, **keys})


def test_a_window_that_no_layer_has_is_none():
    ours = read(**WINDOWED, no_rope_layers=[1, 1, 1])
    assert (ours.sliding_window, ours.layer_types) == (None, (FULL,) * 3)
    assert DecoderConfig.from_hf(ours.to_hf()) == ours


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]"),
        ({"no_rope_layers": [1, [0], 1]}, r"no_rope_layers=\[1, \[0\], 1\]"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
        (
            {"layer_types": [WINDOW, FULL, FULL], "sliding_window": 9},
            "use_sliding_window=None, sliding_window=9",
        ),
        ({"layer_types": [WINDOW, FULL]}, "sliding_window=None"),
        ({"layer_types": [FULL, FULL]}, "must be 3 of full_attention"),
        ({"layer_types": ["chunked_attention", FULL, FULL]}, "must be 3 of full_attention"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "default with full_attention"),
    ],
)
def test_what_transformers_does_not_run_or_runs_in_two_ways_is_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        read(**keys)


@pytest.mark.parametrize(
    ("keys", "lost"),
    [
        ({"no_rope_layer_interval": 2}, r"layers_without_rope=\(1,\) \(it would be \(\)\)"),
        ({**WINDOWED, "no_rope_layers": [1, 1, 0]}, r"sliding_window=9 below max_position"),
        ({"attention_bias": True}, r"attention_bias=True \(it would be False\)"),
    ],
)
def test_a_gguf_file_of_what_llama_cpp_has_built_in_otherwise_is_refused(keys, lost):
    with pytest.raises(ConfigError, match=lost):
        gguf_model(read(**keys), {"token_embd.weight": (99, 32)})
