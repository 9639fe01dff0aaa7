"""Files as they are on the hub: read as `transformers` reads them, and written so that it does."""

import copy
import json

import pytest
from transformers import AutoConfig

from cairn import ConfigError, DecoderConfig

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def of(model_type, architecture, **keys):
    return {"model_type": model_type, "architectures": [architecture], **TOKENS, **keys}


def sizes(hidden, inner, layers, heads, kv_heads, vocabulary, positions):
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "initializer_range": 0.02,
    }


LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED = {
    "Llama-3.1-8B": of(
        "llama",
        "LlamaForCausalLM",
        **sizes(4096, 14336, 32, 32, 8, 128256, 131072),
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        mlp_bias=False,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_scaling=LLAMA3,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    ),
    "c4ai-command-r-v01": of(
        "cohere",
        "CohereForCausalLM",
        **sizes(8192, 22528, 40, 64, 64, 256000, 8192),
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        layer_norm_eps=1e-05,
        logit_scale=0.0625,
        model_max_length=131072,
        rope_theta=8000000.0,
    ),
    "c4ai-command-r-plus": of(
        "cohere",
        "CohereForCausalLM",
        **sizes(12288, 33792, 64, 96, 8, 256000, 8192),
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        layer_norm_eps=1e-05,
        logit_scale=0.8333333333333334,
        model_max_length=131072,
        rope_theta=75000000.0,
        use_qk_norm=True,
    ),
    "c4ai-command-r7b-12-2024": of(
        "cohere2",
        "Cohere2ForCausalLM",
        **sizes(4096, 14336, 32, 32, 8, 256000, 8192),
        attention_bias=False,
        attention_dropout=0.0,
        cache_implementation="hybrid",
        head_dim=128,
        hidden_act="silu",
        layer_norm_eps=1e-05,
        layer_switch=4,
        logit_scale=0.25,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rope_scaling=None,
        rope_theta=50000,
        rotary_pct=1.0,
        sliding_window=4096,
        sliding_window_pattern=4,
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=False,
        use_qk_norm=False,
    ),
    "GLM-4.5-Air": of(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        **sizes(4096, 10944, 46, 96, 8, 151552, 131072),
        attention_bias=True,
        attention_dropout=0.0,
        first_k_dense_replace=1,
        head_dim=128,
        hidden_act="silu",
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=128,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_nextn_predict_layers=1,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=1000000,
        routed_scaling_factor=1.0,
        tie_word_embeddings=False,
        topk_group=1,
        use_qk_norm=False,
    ),
    "Mistral-7B-v0.1": of(
        "mistral",
        "MistralForCausalLM",
        **sizes(4096, 14336, 32, 32, 8, 32000, 32768),
        hidden_act="silu",
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
        sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "Mistral-7B-v0.3": of(
        "mistral",
        "MistralForCausalLM",
        **sizes(4096, 14336, 32, 32, 8, 32768, 32768),
        attention_dropout=0.0,
        hidden_act="silu",
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Mixtral-8x7B-v0.1": of(
        "mixtral",
        "MixtralForCausalLM",
        **sizes(4096, 14336, 32, 32, 8, 32000, 32768),
        attention_dropout=0.0,
        hidden_act="silu",
        num_experts_per_tok=2,
        num_local_experts=8,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
        tie_word_embeddings=False,
    ),
    "Olmo-3-7B-Instruct": of(
        "olmo3",
        "Olmo3ForCausalLM",
        **sizes(4096, 11008, 32, 32, 32, 100278, 65536),
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
        rms_norm_eps=1e-06,
        rope_scaling={
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        rope_theta=500000,
        sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-0.5B": of(
        "qwen2",
        "Qwen2ForCausalLM",
        **sizes(896, 4864, 24, 14, 2, 151936, 32768),
        attention_dropout=0.0,
        hidden_act="silu",
        max_window_layers=24,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=32768,
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "Qwen3-0.6B": of(
        "qwen3",
        "Qwen3ForCausalLM",
        **sizes(1024, 3072, 28, 16, 8, 151936, 40960),
        attention_bias=False,
        attention_dropout=0.0,
        head_dim=128,
        hidden_act="silu",
        max_window_layers=28,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "Qwen1.5-MoE-A2.7B": of(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        **sizes(2048, 5632, 24, 16, 16, 151936, 8192),
        attention_dropout=0.0,
        decoder_sparse_step=1,
        hidden_act="silu",
        max_window_layers=21,
        moe_intermediate_size=1408,
        norm_topk_prob=False,
        num_experts=60,
        num_experts_per_tok=4,
        output_router_logits=False,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=5632,
        sliding_window=32768,
        tie_word_embeddings=False,
        use_sliding_window=False,
    ),
    "Qwen3-30B-A3B": of(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        **sizes(2048, 6144, 48, 32, 4, 151936, 40960),
        attention_bias=False,
        attention_dropout=0.0,
        decoder_sparse_step=1,
        head_dim=128,
        hidden_act="silu",
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
        output_router_logits=False,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        tie_word_embeddings=False,
        use_sliding_window=False,
    ),
    "gemma-2b": of(
        "gemma",
        "GemmaForCausalLM",
        **sizes(2048, 16384, 18, 8, 1, 256000, 8192),
        attention_bias=False,
        attention_dropout=0.0,
        head_dim=256,
        hidden_act="gelu",
        hidden_activation=None,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=10000.0,
    ),
    "gemma-2-9b": of(
        "gemma2",
        "Gemma2ForCausalLM",
        **sizes(3584, 14336, 42, 16, 8, 256000, 8192),
        attention_bias=False,
        attention_dropout=0.0,
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        sliding_window=4096,
        sliding_window_size=4096,
    ),
    "gemma-3-1b-it": of(
        "gemma3_text",
        "Gemma3ForCausalLM",
        **sizes(1152, 6912, 26, 4, 1, 262144, 32768),
        attention_bias=False,
        attention_dropout=0.0,
        attn_logit_softcapping=None,
        cache_implementation="hybrid",
        final_logit_softcapping=None,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-06,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "Phi-3.5-mini": of(
        "phi3",
        "Phi3ForCausalLM",
        **sizes(3072, 8192, 32, 32, 32, 32064, 131072),
        attention_bias=False,
        attention_dropout=0.0,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        embd_pdrop=0.0,
        hidden_act="silu",
        original_max_position_embeddings=4096,
        resid_pdrop=0.0,
        rms_norm_eps=1e-05,
        rope_scaling={
            "long_factor": [1.0 + n / 10 for n in range(48)],
            "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        rope_theta=10000.0,
        sliding_window=262144,
        tie_word_embeddings=False,
    ),
    "Phi-4-mini": of(
        "phi3",
        "Phi3ForCausalLM",
        **sizes(3072, 8192, 32, 24, 8, 200064, 131072),
        attention_bias=False,
        attention_dropout=0.0,
        embd_pdrop=0.0,
        full_attn_mod=1,
        hidden_act="silu",
        interpolate_factor=1,
        lm_head_bias=False,
        mlp_bias=False,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        resid_pdrop=0.0,
        rms_norm_eps=1e-05,
        rope_scaling={
            "long_factor": [1.0 + n / 10 for n in range(48)],
            "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        rope_theta=10000.0,
        sliding_window=262144,
        tie_word_embeddings=True,
    ),
    "pythia-160m": {
        **of("gpt_neox", "GPTNeoXForCausalLM"),
        "hidden_act": "gelu",
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "OLMo-2-7B": of(
        "olmo2",
        "Olmo2ForCausalLM",
        **sizes(4096, 11008, 32, 32, 32, 100352, 4096),
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=500000,
        tie_word_embeddings=False,
    ),
    "falcon-7b": {
        **of("falcon", "FalconForCausalLM"),
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
        "bias": False,
        "hidden_dropout": 0.0,
        "hidden_size": 4544,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "falcon-40b": {
        **of("falcon", "FalconForCausalLM"),
        "alibi": False,
        "bias": False,
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "new_decoder_architecture": True,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_kv_heads": 8,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "SmolLM3-3B": of(
        "smollm3",
        "SmolLM3ForCausalLM",
        **sizes(2048, 11008, 36, 16, 4, 128256, 65536),
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        layer_types=["full_attention"] * 36,
        max_window_layers=28,
        mlp_bias=False,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        pretraining_tp=2,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=5000000.0,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "stablelm-2-1_6b": of(
        "stablelm",
        "StableLmForCausalLM",
        **sizes(2048, 5632, 24, 32, 32, 100352, 4096),
        hidden_act="silu",
        layer_norm_eps=1e-05,
        partial_rotary_factor=0.25,
        rope_theta=10000,
        tie_word_embeddings=False,
        use_qkv_bias=True,
    ),
    "starcoder2-3b": {
        **of("starcoder2", "Starcoder2ForCausalLM"),
        **sizes(3072, 12288, 30, 24, 2, 49152, 16384),
        "attention_dropout": 0.1,
        "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.018042,
        "mlp_type": "default",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "residual_dropout": 0.1,
        "rope_theta": 999999.4420358813,
        "sliding_window": 4096,
        "use_bias": True,
    },
    "GLM-4-9B-0414": of(
        "glm4",
        "Glm4ForCausalLM",
        **sizes(4096, 13696, 40, 32, 2, 151552, 32768),
        attention_bias=True,
        attention_dropout=0.0,
        head_dim=128,
        hidden_act="silu",
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-05,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    ),
    "granite-3.1-2b": of(
        "granite",
        "GraniteForCausalLM",
        **sizes(2048, 8192, 40, 32, 8, 49155, 131072),
        attention_bias=False,
        attention_dropout=0.1,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        hidden_act="silu",
        logits_scaling=8.0,
        mlp_bias=False,
        residual_multiplier=0.22,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=5000000.0,
        tie_word_embeddings=True,
    ),
    "DeepSeek-V2-Lite": of(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        **sizes(2048, 10944, 27, 16, 16, 102400, 163840),
        attention_bias=False,
        attention_dropout=0.0,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        aux_loss_alpha=0.001,
        first_k_dense_replace=1,
        hidden_act="silu",
        kv_lora_rank=512,
        moe_intermediate_size=1408,
        moe_layer_freq=1,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_experts_per_tok=6,
        pretraining_tp=1,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rms_norm_eps=1e-06,
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        rope_theta=10000,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        seq_aux=True,
        tie_word_embeddings=False,
        topk_group=1,
        topk_method="greedy",
        v_head_dim=128,
    ),
    "DeepSeek-V3-bf16": of(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        **sizes(7168, 18432, 61, 128, 128, 129280, 163840),
        attention_bias=False,
        attention_dropout=0.0,
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        aux_loss_alpha=0.001,
        ep_size=1,
        first_k_dense_replace=3,
        hidden_act="silu",
        kv_lora_rank=512,
        moe_intermediate_size=2048,
        moe_layer_freq=1,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_experts_per_tok=8,
        num_nextn_predict_layers=1,
        pretraining_tp=1,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rms_norm_eps=1e-06,
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        rope_theta=10000,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        seq_aux=True,
        tie_word_embeddings=False,
        topk_group=4,
        topk_method="noaux_tc",
        v_head_dim=128,
    ),
    "gpt-oss-20b-bf16": of(
        "gpt_oss",
        "GptOssForCausalLM",
        **sizes(2880, 2880, 24, 64, 8, 201088, 131072),
        attention_bias=True,
        attention_dropout=0.0,
        experts_per_token=4,
        head_dim=64,
        hidden_act="silu",
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12,
        num_experts_per_tok=4,
        num_local_experts=32,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
    ),
}


SAYS_LESS = {
    "c4ai-command-r-plus": (
        *("layer_norm_eps", "logit_scale", "num_key_value_heads", "rope_theta", "use_qk_norm"),
    ),
    # gpt-oss has YaRN where its file says of no scaling.
    "gpt-oss-20b-bf16": ("rope_scaling", "rope_theta"),
    "SmolLM3-3B": ("layer_types", "no_rope_layer_interval", "no_rope_layers", "rope_theta"),
    "starcoder2-3b": (
        *("attention_dropout", "embedding_dropout", "residual_dropout", "hidden_act"),
        *("initializer_range", "norm_epsilon", "rope_theta", "sliding_window", "use_bias"),
    ),
}


def theirs(data):
    """The same file as this version of `transformers` understands and writes it."""
    fields = copy.deepcopy(data)  # transformers writes into what it is given
    fields = {
        key: value for key, value in fields.items() if key not in ("architectures", "auto_map")
    }
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    written = json.loads(config.to_json_string(use_diff=False))
    return {**written, "architectures": data["architectures"]}


@pytest.mark.filterwarnings("ignore:.*attention_dropout=0.1.* the decoder has none of it")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_as_transformers_reads_it(name):
    data = PUBLISHED[name]
    ours = DecoderConfig.from_hf(data)
    assert ours == DecoderConfig.from_hf(theirs(data))


@pytest.mark.filterwarnings("ignore:.*attention_dropout=0.1.* the decoder has none of it")
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_means_the_same_to_transformers(name):
    ours = DecoderConfig.from_hf(PUBLISHED[name])
    written = ours.to_hf()
    assert DecoderConfig.from_hf(written) == ours
    assert DecoderConfig.from_hf(theirs(written)) == ours
    assert DecoderConfig.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours


def test_a_null_that_transformers_takes_is_what_it_takes_it_for():
    data = PUBLISHED["DeepSeek-V3-bf16"] | {"norm_topk_prob": None}
    assert not DecoderConfig.from_hf(data).experts.normalize


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("name", SAYS_LESS)
def test_what_a_file_leaves_out_is_what_transformers_takes(name, null):
    less = {key: value for key, value in PUBLISHED[name].items() if key not in SAYS_LESS[name]}
    ours = DecoderConfig.from_hf(less | (dict.fromkeys(SAYS_LESS[name]) if null else {}))
    assert ours == DecoderConfig.from_hf(theirs(less))
    assert DecoderConfig.from_hf(ours.to_hf()) == ours


STRETCHED = {
    "long_factor": [2.0] * 48,
    "short_factor": [1.0] * 48,
    "type": "longrope",
    "original_max_position_embeddings": 8192,
}


@pytest.mark.filterwarnings("ignore:.*attention_dropout=0.1. the decoder has none of it")
@pytest.mark.parametrize(
    ("name", "keys", "found"),
    [
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (
            "Qwen3-30B-A3B",
            {"norm_topk_prob": "false"},
            "norm_topk_prob='false' .true or false belongs",
        ),
        (
            "gemma-3-1b-it",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "an entry for each kind of layers, full_attention and sliding_attention; found .*8.0",
        ),
        (
            "gemma-3-1b-it",
            {
                "rope_parameters": {"full_attention": {"rope_type": "default"}},
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            "rope_type='linear' in rope_scaling, and 'default' in rope_parameters",
        ),
        (
            "Phi-3.5-mini",
            {"rope_scaling": STRETCHED},
            "expected one original_max_position_embeddings; found 4096, and 8192 beside",
        ),
        (
            "Phi-3.5-mini",
            {"original_max_position_embeddings": None, "rope_scaling": STRETCHED},
            "found 8192 beside rope_type 'longrope' alone, where transformers takes 4096",
        ),
        (
            "gemma-3-1b-it",
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "type='linear', by which transformers scales nothing in this family; call it rope_type",
        ),
        (
            "gemma-3-1b-it",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 4096,
                    "truncate": False,
                }
            },
            "no truncate, which transformers does not read in this family",
        ),
        ("granite-3.1-2b", {"logits_scaling": 0}, "logits_scaling=0 .a positive number belongs"),
        ("granite-3.1-2b", {"logits_scaling": -8.0}, "logits_scaling=-8.0 .a positive number"),
        ("granite-3.1-2b", {"attention_multiplier": 0}, "attention_scale is attention_multiplier"),
        ("granite-3.1-2b", {"residual_multiplier": "0"}, "residual_multiplier='0' .a number"),
        ("gemma-2-9b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 .a positive integer"),
        ("gemma-2-9b", {"final_logit_softcapping": 0}, "logit_soft_cap is final_logit_softcapping"),
        ("DeepSeek-V3-bf16", {"head_dim": 128}, "expected head_dim 64, .*found head_dim=128"),
        ("DeepSeek-V3-bf16", {"num_local_experts": 8}, "found num_local_experts=8"),
        ("DeepSeek-V3-bf16", {"rope_interleave": None}, "rope_interleave=None"),
        ("falcon-40b", {"parallel_attn": False}, "parallel_attn=False"),
        (
            "pythia-160m",
            {"rotary_emb_base": None, "rope_theta": 5e5},
            "rope_theta=500000.0, where rotary_emb_base",
        ),
        ("falcon-7b", {"multi_query": False, "num_kv_heads": 8}, "num_kv_heads=8"),
        ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
        (
            "gpt-oss-20b-bf16",
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4096}},
            "no factor",
        ),
        (
            "gpt-oss-20b-bf16",
            {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": None}},
            "truncate=None in rope_scaling, not true or false",
        ),
        ("Llama-3.1-8B", {"hidden_act": False}, "hidden_act=False .a text belongs there"),
        ("Llama-3.1-8B", {"rope_scaling": {"rope_type": []}}, r"found \[\]"),
    ],
)
def test_what_transformers_would_compute_otherwise_is_refused(name, keys, found):
    with pytest.raises(ConfigError, match=found):
        DecoderConfig.from_hf(PUBLISHED[name] | keys)


def test_a_null_share_of_each_head_turns_all_of_it_as_transformers_reads_it():
    data = PUBLISHED["GLM-4-9B-0414"] | {"partial_rotary_factor": None}
    ours = DecoderConfig.from_hf(data)
    assert ours.rope.rotary_fraction == 1.0
    assert "partial_rotary_factor" not in theirs(data)["rope_parameters"]
    assert theirs(ours.to_hf())["rope_parameters"]["partial_rotary_factor"] == 1.0


def test_a_window_that_no_layer_has_is_written_again():
    ours = DecoderConfig.from_hf(PUBLISHED["Qwen2.5-0.5B"] | {"use_sliding_window": True})
    assert {*ours.layer_types} == {"full_attention"}
    assert ours.sliding_window == 32768
    assert DecoderConfig.from_hf(ours.to_hf()) == ours


def test_a_null_flag_is_false_where_transformers_reads_it_so():
    data = PUBLISHED["falcon-7b"] | {"parallel_attn": None, "multi_query": None}
    assert DecoderConfig.from_hf(data) == DecoderConfig.from_hf(
        data | {"parallel_attn": False, "multi_query": False}
    )


def test_the_first_name_of_longrope_is_read_as_longrope():
    """As transformers 4 reads it; 5.23 misses a length, which lies beside the scaling."""
    data = PUBLISHED["Phi-3.5-mini"]
    older = data | {"rope_scaling": data["rope_scaling"] | {"type": "su"}}
    ours = DecoderConfig.from_hf(older)
    assert ours == DecoderConfig.from_hf(data) == DecoderConfig.from_hf(theirs(data))
    with pytest.raises(ConfigError, match="found 'su'"):
        DecoderConfig.from_hf(PUBLISHED["Llama-3.1-8B"] | {"rope_scaling": {"type": "su"}})


@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 4096}])
def test_phi3_was_trained_on_4096_tokens_where_its_file_does_not_say(inner):
    data = PUBLISHED["Phi-3.5-mini"]
    data = {key: one for key, one in data.items() if key != "original_max_position_embeddings"}
    data["rope_scaling"] = data["rope_scaling"] | inner
    assert DecoderConfig.from_hf(data) == DecoderConfig.from_hf(PUBLISHED["Phi-3.5-mini"])
    assert theirs(data)["rope_parameters"]["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("DeepSeek-V2-Lite", "routed_scaling_factor"),
        ("DeepSeek-V3-bf16", "qk_rope_head_dim"),
        ("gemma-2-9b", "query_pre_attn_scalar"),
        ("gpt-oss-20b-bf16", "num_local_experts"),
        ("Qwen2.5-0.5B", "max_window_layers"),
    ],
)
def test_a_null_is_as_no_key(name, key):
    data = {other: value for other, value in PUBLISHED[name].items() if other != key}
    assert DecoderConfig.from_hf(data | {key: None}) == DecoderConfig.from_hf(data)
