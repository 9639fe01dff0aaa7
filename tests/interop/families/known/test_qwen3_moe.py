"""The family `qwen3_moe`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "qwen3_moe"
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
CONFIGS = {
    "dense_first": {**EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True},
    "window": {**EXPERTS, "use_sliding_window": True, "sliding_window": 9},
}


class TestQwen3Moe(FamilyTests):
    pass
