"""The family `qwen2_moe`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "qwen2_moe"
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
CONFIGS = {
    "turns": {**EXPERTS, "decoder_sparse_step": 2, "num_hidden_layers": 5},
    "window_normalized": {
        **EXPERTS,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
        "qkv_bias": False,
    },
}


class TestQwen2Moe(FamilyTests):
    pass
