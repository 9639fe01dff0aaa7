"""Tunix: NNX models that store each layer by itself, with heads as an axis of their own.

Sources: google-tunix 0.1.7, `models/llama3`, `models/qwen2`, `models/qwen3`, `models/gemma3`, and
`sft/checkpoint_manager.py`, whose steps have an item "model_params".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.layout_ops import Merge, Permute, Unstack
from cairn.interop.conversion.ops import Op, Shape
from cairn.interop.conversion.rules import Rule, RuleTable
from cairn.interop.errors import ConversionError
from cairn.interop.trainers.layer_groups import (
    LayerGroup,
    StoredLeaf,
    chained,
    group_rules,
    head_ops,
    norms_of,
    padded,
)
from cairn.interop.trainers.trainer import Reading, Trainer

__all__ = ["TRAINER"]

_EMBEDDING: Final = "embedder/input_embedding"
_HEAD: Final = "lm_head/w"
_LAYER: Final = re.compile(r"layers/([0-9]+)/(.+)")
_QUERIES: Final = "attn/q_einsum/w"
_KEYS_AND_VALUES: Final = "attn/kv_einsum/w"
_ALL_THREE: Final = "attn/qkv_einsum/w"

_GEMMA_NORMS: Final = {
    "input_layernorm": "pre_attention_norm/scale",
    "attention_output_norm": "post_attention_norm/scale",
    "post_attention_layernorm": "pre_ffw_norm/scale",
    "mlp_output_norm": "post_ffw_norm/scale",
    "self_attn/q_norm": "attn/_query_norm/scale",
    "self_attn/k_norm": "attn/_key_norm/scale",
}
_NORMS: Final = {
    "input_layernorm": "input_layernorm/w",
    "post_attention_layernorm": "post_attention_layernorm/w",
    "self_attn/q_norm": "attn/q_norm/w",
    "self_attn/k_norm": "attn/k_norm/w",
}
_QWEN3_BASE: Final = 1e6
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


def _groups(shapes: Mapping[str, Shape]) -> list[LayerGroup]:
    numbers = sorted({int(match[1]) for path in shapes if (match := _LAYER.fullmatch(path))})
    return [LayerGroup(f"layers/{number}", (number,)) for number in numbers]


def _read(shapes: Mapping[str, Shape]) -> Reading:
    inner = {
        match[2]: shape
        for path, shape in shapes.items()
        if (match := _LAYER.fullmatch(path)) and match[1] == "0"
    }
    vocabulary, width = shapes[_EMBEDDING]
    if _QUERIES in inner and _KEYS_AND_VALUES in inner:
        (heads, _, size), (_, shared, _, _) = inner[_QUERIES], inner[_KEYS_AND_VALUES]
    elif _ALL_THREE in inner:
        _, heads, _, size = inner[_ALL_THREE]
        shared = heads
    elif "attn/q_proj/w" in inner and "attn/k_proj/w" in inner:
        (_, heads, size), (_, shared, _) = inner["attn/q_proj/w"], inner["attn/k_proj/w"]
    else:
        raise ConversionError(
            path="a tree of Tunix",
            expected=f"layers/0/attn with q_proj and k_proj, or with {_QUERIES}",
            found=", ".join(sorted(inner)[:8]) or "no layers/0",
            next_step="adopt the folder with a map of your own (--config and --map)",
        )
    gemma = "pre_attention_norm/scale" in inner
    moe = inner.get("mlp/gate_proj") or inner.get("mlp/gate_proj/value")
    gate = moe or inner.get("mlp/gate_proj/kernel", (0,))
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": gate[-1],
        "num_hidden_layers": len(_groups(shapes)),
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": size,
        "tie_word_embeddings": _HEAD not in shapes,
    }
    model_types: tuple[str, ...] = ("llama",)
    if gemma:
        model_types = ("gemma3_text",)
    elif moe is not None:
        sizes |= {"num_experts": moe[0], "moe_intermediate_size": moe[-1]}
        model_types = ("qwen3_moe",)
    elif "attn/q_norm/w" in inner:
        model_types = ("qwen3",)
    elif "attn/q_bias" in inner:
        model_types = ("qwen2",)
    return Reading(sizes, "a layer at a time", model_types)


def _attention(config: DecoderConfig, shapes: Mapping[str, Shape]) -> list[StoredLeaf]:
    heads = {"q": config.num_attention_heads, "k": config.kv_heads, "v": config.kv_heads}
    out = (Merge((config.num_attention_heads, config.head_size)),)
    ours = {name: f"self_attn/{name}_proj/kernel" for name in "qkvo"}
    if config.block != "sandwich":
        leaves = [
            StoredLeaf((ours[name],), f"attn/{name}_proj/w", head_ops(config, heads[name], axis=1))
            for name in "qkv"
        ]
        if config.attention_bias:
            leaves += [
                StoredLeaf((f"self_attn/{name}_proj/bias",), f"attn/{name}_bias") for name in "qkv"
            ]
        return [*leaves, StoredLeaf((ours["o"],), "attn/o_proj/w", out)]
    # Their einsums keep heads first: [heads, width, head size].
    front = Permute((1, 0, 2))
    queries: tuple[Op, ...] = (front, *head_ops(config, heads["q"], axis=1))
    shared: tuple[Op, ...] = (front, *head_ops(config, heads["k"], axis=1))
    leaves = [StoredLeaf((ours["o"],), "attn/attn_vec_einsum/w", out)]
    if f"layers/0/{_ALL_THREE}" in shapes:
        names = tuple(ours[name] for name in "qkv")
        return [*leaves, StoredLeaf(names, _ALL_THREE, (Unstack(3), *queries))]
    return [
        *leaves,
        StoredLeaf((ours["q"],), _QUERIES, queries),
        StoredLeaf((ours["k"], ours["v"]), _KEYS_AND_VALUES, (Unstack(2), *shared)),
    ]


def _rules(config: DecoderConfig, shapes: Mapping[str, Shape], pairs: bool | None) -> RuleTable:
    gemma = config.block == "sandwich"
    norms = _GEMMA_NORMS if gemma else _NORMS
    leaves = [StoredLeaf((f"{path}/scale",), norms.get(path, path)) for path in norms_of(config)]
    leaves += _attention(config, shapes)
    if config.experts is None:
        leaves += [StoredLeaf((f"mlp/{name}/kernel",), f"mlp/{name}/kernel") for name in _MLP]
    else:
        leaves.append(StoredLeaf(("mlp/router/kernel",), "mlp/router/kernel"))
        leaves += [StoredLeaf((f"mlp/experts/{name}/kernel",), f"mlp/{name}") for name in _MLP]
    embedded = padded(config.vocab_size, shapes.get(_EMBEDDING))
    last = "final_norm/scale" if gemma else "final_norm/w"
    rules = [Rule.one("model/embed_tokens/embedding", _EMBEDDING, chained(embedded))]
    rules += group_rules(_groups(shapes), leaves)
    rules.append(Rule.one("model/norm/scale", last))
    if not config.tie_word_embeddings:
        head = padded(config.vocab_size, shapes.get(_HEAD), 1)
        rules.append(Rule.one("lm_head/kernel", _HEAD, chained(head)))
    return RuleTable(tuple(rules))


def _assumed(config: DecoderConfig, pairs: bool | None) -> tuple[str, ...]:
    if config.model_type != "qwen3" or config.rope is None or config.rope.theta == _QWEN3_BASE:
        return ()
    return (
        f"rotary positions of base {config.rope.theta:g}, as the config says: Qwen3 in tunix 0.1.7 "
        f"has {_QWEN3_BASE:g} whatever its config says",
    )


TRAINER = Trainer("tunix", _EMBEDDING, _read, _rules, _assumed)
