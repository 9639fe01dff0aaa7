"""The family `deepseek_v2`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "deepseek_v2"
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "rms_norm_eps": 0.1,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "head_dim": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "groups": {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "whole_queries": {**LATENT, "q_lora_rank": None, "routed_scaling_factor": 2.0},
}


class TestDeepseekV2(FamilyTests):
    pass
