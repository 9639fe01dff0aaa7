"""The leaves of a decoder by path, and their shapes: what a config describes. JAX-free."""

from __future__ import annotations

from cairn.state.config import DecoderConfig
from cairn.state.conversion import Shape


def leaf_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Shape of every leaf that `DecoderForCausalLM` has with this config."""
    model, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_size
    shared = config.kv_heads * config.head_size
    bias, out_bias, mlp_bias = config.attention_bias, config.attention_out_bias, config.mlp_bias
    layer: dict[str, Shape] = {"input_layernorm/scale": (model,)}
    for name, features_in, features_out, has_bias in (
        ("self_attn/q_proj", model, queries, bias),
        ("self_attn/k_proj", model, shared, bias),
        ("self_attn/v_proj", model, shared, bias),
        ("self_attn/o_proj", queries, model, out_bias),
        ("mlp/gate_proj", model, inner, mlp_bias),
        ("mlp/up_proj", model, inner, mlp_bias),
        ("mlp/down_proj", inner, model, mlp_bias),
    ):
        layer[f"{name}/kernel"] = (features_in, features_out)
        if has_bias:
            layer[f"{name}/bias"] = (features_out,)
    layer["post_attention_layernorm/scale"] = (model,)
    shapes: dict[str, Shape] = {"model/embed_tokens/embedding": (config.vocab_size, model)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model/layers/{number}/{name}": shape for name, shape in layer.items()}
    shapes["model/norm/scale"] = (model,)
    if not config.tie_word_embeddings:
        shapes["lm_head/kernel"] = (model, config.vocab_size)
    return shapes
