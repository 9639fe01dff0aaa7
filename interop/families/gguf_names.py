"""Names that llama.cpp gives a decoder's layers, and its converter's changes to tensors.

Source: the package `gguf`; llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.ops import TRANSPOSE, Array, Chain, Op, RotaryRows, Shape
from cairn.interop.conversion.value_ops import Plus
from cairn.interop.families.names import Fused, Names

__all__ = ["FUSED_MLP", "FUSED_QKV", "NORMS_PLUS_ONE", "ROTARY_PAIRS", "gguf_names"]

FUSED_QKV = Fused("attn_qkv", tuple(f"self_attn/{name}_proj" for name in "qkv"))
"""Queries, keys and values in one tensor, one after the other."""

FUSED_MLP = Fused("ffn_up", ("mlp/gate_proj", "mlp/up_proj"))
"""Gate and up projections in one tensor, one after the other."""


@dataclass(frozen=True)
class Column(Op):
    """Kernel of one output: leaf [in, 1], tensor [1, in], or [in] from older converters."""

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return each tensor as a column."""
        return [array.reshape(-1, 1) for array in tensors]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return each leaf as a row."""
        return [array.reshape(1, -1) for array in leaves]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shape of each column."""
        for shape in shapes:
            if len(shape) != 1 and (len(shape) != 2 or shape[0] != 1):
                raise ValueError(f"one row, found shape {shape}")
        return [(shape[-1], 1) for shape in shapes]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shape of each row."""
        return [(1, shape[0]) for shape in shapes]


def _pairs(heads: int, leaf: str) -> Op:
    rows = RotaryRows(heads)
    return rows if leaf == "bias" else Chain((rows, TRANSPOSE))


Ops = Mapping[str, Callable[[DecoderConfig, str], Op]]

ROTARY_PAIRS: Ops = MappingProxyType(
    {
        "self_attn/q_proj": lambda config, leaf: _pairs(config.num_attention_heads, leaf),
        "self_attn/k_proj": lambda config, leaf: _pairs(config.kv_heads, leaf),
    }
)
"""Layer path -> operation that reorders rows: llama.cpp rotates neighbouring pairs there."""

NORMS_PLUS_ONE: Ops = MappingProxyType(
    dict.fromkeys(
        (
            *("input_layernorm", "attention_output_norm", "post_attention_layernorm"),
            *("mlp_output_norm", "self_attn/q_norm", "self_attn/k_norm", "model/norm"),
        ),
        lambda config, leaf: Plus(1.0),
    )
)
"""Layer path -> operation, for norms that multiply by 1 + scale: the file stores the sum."""

_EACH = ("gate", "up", "down")


def gguf_names(**changes: Any) -> Names:
    """Return llama.cpp's names of a decoder's layers.

    Args:
        **changes: other attributes of `Names`; mappings are merged with the usual ones.
    """
    usual: dict[str, Any] = {
        "top": {
            "model/embed_tokens": "token_embd",
            "model/embed_positions": "position_embd",
            "model/norm": "output_norm",
            "lm_head": "output",
        },
        "layer": "blk.{layer}",
        "layer_names": {
            "input_layernorm": "attn_norm",
            **{f"self_attn/{name}_proj": f"attn_{name}" for name in "qkv"},
            **{f"self_attn/{name}_norm": f"attn_{name}_norm" for name in "qk"},
            "self_attn/o_proj": "attn_output",
            "self_attn/sinks": "attn_sinks.weight",
            "attention_output_norm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            **{f"mlp/{name}_proj": f"ffn_{name}" for name in _EACH},
            "mlp/router": "ffn_gate_inp",
            "mlp/correction": "exp_probs_b.bias",
            **{f"mlp/experts/{name}_proj": f"ffn_{name}_exps" for name in _EACH},
            **{f"mlp/shared/{name}_proj": f"ffn_{name}_shexp" for name in _EACH},
            "mlp/shared_gate": "ffn_gate_inp_shexp",
            "mlp_output_norm": "post_ffw_norm",
        },
        "stacked": {},
        "ops": {"mlp/shared_gate": lambda config, leaf: Column()},
        "tolerated": (r"rope_freqs\.weight",),
    }
    for name, change in changes.items():
        usual[name] = {**usual[name], **change} if isinstance(change, Mapping) else change
    return Names(**usual)
