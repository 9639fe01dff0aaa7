"""The family `qwen3`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "qwen3"
CONFIGS = {
    "biases": {"attention_bias": True},
    "window_tied": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
}


class TestQwen3(FamilyTests):
    pass
