"""The family `gemma3_text`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "gemma3_text"
CONFIGS = {
    "windows": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "turns": {"sliding_window": 9, "num_hidden_layers": 7},
}


class TestGemma3Text(FamilyTests):
    pass
