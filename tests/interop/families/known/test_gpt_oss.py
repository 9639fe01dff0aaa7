"""The family `gpt_oss`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "gpt_oss"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": YARN}
CONFIGS = {
    "windows": {**EXPERTS, "sliding_window": 9},
    "four_layers": {**EXPERTS, "sliding_window": 5, "num_hidden_layers": 4, "swiglu_limit": 0.5},
}


class TestGptOss(FamilyTests):
    pass
