"""Falcon 7B, 40B, 180B and 11B: fused queries, keys and values; parallel attention and MLP.

Source: transformers `FalconConfig`, `FalconForCausalLM`; arXiv 2311.16867.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.errors import ConfigError
from cairn.interop.families.config_form import SIZES, ConfigForm, Refused, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import FUSED_QKV, gguf_names
from cairn.interop.families.names import Names, qkv_by_group


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    newer, heads = bool(data.get("new_decoder_architecture", False)), options["num_attention_heads"]
    parallel, one_key = (bool(data.get(key, True)) for key in ("parallel_attn", "multi_query"))
    norms = data.get("num_ln_in_parallel_attn") or (2 if newer else 1)
    groups = 1 if one_key and not newer else data.get("num_kv_heads", heads)
    apart = not newer and not one_key and groups != heads
    two_norms = parallel and not newer and norms == 2
    if apart or two_norms or (newer and not parallel):
        what = f"num_kv_heads={groups}" if apart else "parallel_attn=False"
        what = "num_ln_in_parallel_attn=2" if two_norms else what
        raise ConfigError(
            path="config.json of a 'falcon' model",
            expected="layers as transformers has them",
            found=f"{what} with num_attention_heads={heads}, "
            f"new_decoder_architecture={newer}, multi_query={one_key}",
            next_step="correct one of these keys",
        )
    return {
        "attention_out_bias": options["attention_bias"],
        "block": "parallel" if parallel else "pre",
        "intermediate_size": data.get("ffn_hidden_size") or 4 * options["hidden_size"],
        "mlp_bias": options["attention_bias"],
        "num_key_value_heads": groups,
        "shared_norm": parallel and norms == 1,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    parallel, one_each = config.block == "parallel", config.kv_heads == config.num_attention_heads
    newer = parallel and (not config.shared_norm or not (config.kv_heads == 1 or one_each))
    return {
        "alibi": False,
        "ffn_hidden_size": config.intermediate_size,
        "multi_query": config.kv_heads == 1,
        "new_decoder_architecture": newer,
        "num_kv_heads": config.kv_heads,
        "num_ln_in_parallel_attn": (1 if config.shared_norm else 2) if newer else None,
        "parallel_attn": parallel,
    }


def _names(config: DecoderConfig) -> Names:
    apart = config.block == "parallel" and not config.shared_norm
    norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"} if apart else {}
    return Names(
        top={
            "model/embed_tokens": "transformer.word_embeddings",
            "model/norm": "transformer.ln_f",
            "lm_head": "lm_head",
        },
        layer="transformer.h.{layer}",
        layer_names={
            "self_attn/o_proj": "self_attention.dense",
            "mlp/up_proj": "mlp.dense_h_to_4h",
            "mlp/down_proj": "mlp.dense_4h_to_h",
            **norms,
        },
        fused=(qkv_by_group("self_attention.query_key_value"),),
        tolerated=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    )


def _gguf_names(config: DecoderConfig) -> Names:
    norms = {"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"}
    return gguf_names(fused=(FUSED_QKV,), layer_names={} if config.shared_norm else norms)


FAMILY = Family(
    ConfigForm(
        "falcon",
        "FalconForCausalLM",
        sizes={
            key: option
            for key, option in SIZES.items()
            if key not in ("intermediate_size", "max_position_embeddings")
        },
        options=usual_options(
            bias=("attention_bias", False),
            head_dim=None,
            layer_norm_epsilon=("rms_norm_eps", 1e-5),
            max_position_embeddings=("max_position_embeddings", 2048),
            num_key_value_heads=None,
            rms_norm_eps=None,
            tie_word_embeddings=("tie_word_embeddings", True),
        ),
        fixed={"gated_mlp": False, "norm": "layer", "norm_bias": True},
        refused={"alibi": Refused((False, None), "positions are rotary here")},
        activation=("activation", "gelu"),
        also_read=frozenset(
            {
                *("auto_map", "ffn_hidden_size", "multi_query", "new_decoder_architecture"),
                *("num_kv_heads", "num_ln_in_parallel_attn", "parallel_attn"),
            }
        ),
        carried=frozenset({"apply_residual_connection_post_layernorm", "ff_factor"}),
        read=_read,
        write=_write,
        nulls=frozenset({"multi_query", "parallel_attn"}),  # null means False; absent, True
    ),
    _names,
    GGUFForm(
        "falcon",
        _gguf_names,
        sizes=gguf_sizes(intermediate_size="ffn_hidden_size", layer_norm="layer_norm_epsilon"),
        flags={"bias": "blk.0.attn_qkv.bias"},
        only={"tensor_data_layout": ("jploski",)},
        fixed={"new_decoder_architecture": True},  # decides on groups and norms
        read=lambda content, data: {
            "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in content.shapes else 1
        },
        write=lambda config, said: {"tensor_data_layout": "jploski"},
        heads="num_kv_heads",
        head_dim=None,
        engine=Engine({"attention_bias": (False,)}),
    ),
)
