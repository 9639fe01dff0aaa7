"""The family `qwen2`."""

from tests.interop.families.matrix import FamilyTests

WINDOW = {"use_sliding_window": True, "sliding_window": 9}

MODEL_TYPE = "qwen2"
CONFIGS = {
    "window": {**WINDOW, "max_window_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


class TestQwen2(FamilyTests):
    pass
