"""Kinds of values of the keys of config.json; a key has the same kind in every family.

A value of another kind is refused before it is used. `transformers` refuses most of them too, and
takes the others by their truth (a text is true, an empty list is false).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Any, Final

from cairn.interop.config.base import is_integer
from cairn.interop.config.hf_keys import DROPOUTS

__all__ = [
    "COUNT",
    "COUNT_OR_ZERO",
    "FLAG",
    "INTEGERS",
    "KINDS",
    "NUMBER",
    "POSITIVE",
    "TEXT",
    "TEXTS",
    "Kind",
    "wrong_kinds",
]

_FLAGS: Final = frozenset(
    {
        *("alibi", "apply_residual_connection_post_layernorm", "attention_bias", "bias"),
        *("lm_head_bias", "mlp_bias", "multi_query", "new_decoder_architecture"),
        *("norm_topk_prob", "output_router_logits", "parallel_attn", "qk_layernorm", "qkv_bias"),
        *("reorder_and_upcast_attn", "rope_interleave", "scale_attn_by_inverse_layer_idx"),
        *("scale_attn_weights", "seq_aux", "summary_proj_to_labels", "summary_use_proj"),
        *("tie_word_embeddings", "use_bidirectional_attention", "use_parallel_residual"),
        *("use_qkv_bias", "use_sliding_window"),
    }
)
_COUNTS: Final = frozenset(
    {
        *("decoder_sparse_step", "experts_per_token", "ff_factor", "ffn_hidden_size"),
        *("full_attn_mod", "head_dim", "hidden_size", "initial_context_length"),
        "intermediate_size",
        *("interpolate_factor", "kv_lora_rank", "max_position_embeddings"),
        *("moe_intermediate_size", "moe_layer_freq", "n_ctx", "n_embd", "n_group", "n_head"),
        *("n_inner", "n_layer", "n_positions", "n_routed_experts", "num_attention_heads"),
        *("num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads"),
        *("num_kv_heads", "num_ln_in_parallel_attn", "num_local_experts", "pretraining_tp"),
        *("original_max_position_embeddings", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim"),
        *("qk_rope_head_dim", "query_pre_attn_scalar", "shared_expert_intermediate_size"),
        *("sliding_window_pattern", "topk_group", "v_head_dim", "vocab_size"),
        "_sliding_window_pattern",
    }
)
_COUNTS_OR_ZERO: Final = frozenset(
    {
        *("ep_size", "first_k_dense_replace", "max_window_layers", "n_shared_experts"),
        *("num_mtp_layers", "num_nextn_predict_layers", "sliding_window", "sliding_window_size"),
    }
)
_POSITIVE: Final = frozenset(
    {
        *("logits_scaling", "partial_rotary_factor", "rope_local_base_freq", "rope_theta"),
        *("rotary_emb_base", "rotary_pct", "swiglu_alpha", "swiglu_limit"),
    }
)
_NUMBERS: Final = frozenset(
    {
        *("attention_multiplier", "attn_logit_softcapping", "aux_loss_alpha", "classifier_dropout"),
        *("embedding_multiplier", "final_logit_softcapping", "initializer_range"),
        *("layer_norm_eps", "layer_norm_epsilon", "residual_multiplier", "rms_norm_eps"),
        *("routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise"),
        "summary_first_dropout",
    }
)
_TEXTS: Final = frozenset(
    {
        *("activation", "activation_function", "cache_implementation", "hidden_act"),
        *("hidden_activation", "scoring_func", "summary_activation", "summary_type"),
        "topk_method",
    }
)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list_of(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(kind, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


Kind = tuple[str, Callable[[Any], bool]]

FLAG: Final[Kind] = ("true or false", lambda value: isinstance(value, bool))
COUNT: Final[Kind] = ("a positive integer", lambda value: is_integer(value) and value > 0)
COUNT_OR_ZERO: Final[Kind] = (
    "an integer, 0 or more",
    lambda value: is_integer(value) and value >= 0,
)
POSITIVE: Final[Kind] = ("a positive number", lambda value: is_number(value) and value > 0)
NUMBER: Final[Kind] = ("a number", is_number)
TEXT: Final[Kind] = ("a text", _is_text)
TEXTS: Final[Kind] = ("a list of texts", _is_list_of(_is_text))
INTEGERS: Final[Kind] = ("a list of integers", _is_list_of(is_integer))

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        **dict.fromkeys(_FLAGS, FLAG),
        **dict.fromkeys(_COUNTS, COUNT),
        **dict.fromkeys(_COUNTS_OR_ZERO, COUNT_OR_ZERO),
        **dict.fromkeys(_POSITIVE, POSITIVE),
        **dict.fromkeys(DROPOUTS | _NUMBERS, NUMBER),
        **dict.fromkeys(_TEXTS, TEXT),
        "auto_map": ("an object", lambda value: isinstance(value, Mapping)),
        "layer_types": TEXTS,
        "mlp_only_layers": INTEGERS,
    }
)
"""Key -> its kind: a description, and a check of a value.

Null is always accepted. Keys of a single family are in that family's file.
"""


def wrong_kinds(data: Mapping[str, Any], read: Set[str], own: Mapping[str, Kind]) -> list[str]:
    """Return a line for each value of the wrong kind, with its key and the right kind.

    Args:
        data: the content of config.json.
        read: the keys that the family reads.
        own: kinds of keys that the family alone has.
    """
    kinds = {**KINDS, **own}
    return [
        f"{key}={value!r} ({kinds[key][0]} belongs there)"
        for key, value in data.items()
        if value is not None and key in read and key in kinds and not kinds[key][1](value)
    ]
