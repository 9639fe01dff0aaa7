"""The family `deepseek_v3`."""

from tests.interop.families.matrix import FamilyTests

MODEL_TYPE = "deepseek_v3"
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
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
CONFIGS = {
    "yarn": {**LATENT, "rope_parameters": YARN},
    "whole_queries": {**LATENT, "q_lora_rank": None, "attention_bias": True},
}


class TestDeepseekV3(FamilyTests):
    pass
