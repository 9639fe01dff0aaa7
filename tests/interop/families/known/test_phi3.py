"""The family `phi3`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "phi3"
WITHOUT = ("head_dim",)
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.5, 3.0, 4.0],
}
CONFIGS = {
    "beyond_its_length": {
        "original_max_position_embeddings": 32,
        "rope_parameters": LONG,
        "sliding_window": 9,
    },
    "part_of_each_head": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "tie_word_embeddings": True,
    },
}


class TestPhi3(FamilyTests):
    pass
