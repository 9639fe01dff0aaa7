"""MaxText: decoders whose layers are scanned along axis 1, or stored one by one.

Its Linen and NNX models store the same tree. Queries are not scaled in its attention unless they
are normalised: the factor is in the weights. Norms store 1 + w where Hugging Face stores w, and
Gemma's embedding is stored with its factor. Sources: maxtext 0.2.5, `layers/attentions.py`,
`layers/nnx_decoders.py`, `models/` and `checkpoint_conversion/utils/param_mapping.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.layout_ops import Merge
from cairn.interop.conversion.ops import Op, Shape
from cairn.interop.conversion.rules import Rule, RuleTable
from cairn.interop.conversion.value_ops import Plus, Times
from cairn.interop.errors import ConversionError
from cairn.interop.trainers.layer_groups import (
    LayerGroup,
    StoredLeaf,
    chained,
    group_rules,
    head_ops,
    norms_of,
    padded,
    scan_axis,
)
from cairn.interop.trainers.trainer import HeadRounding, Reading, Trainer, TreeLayout

__all__ = ["TRAINER"]

_EMBEDDING: Final = "token_embedder/embedding"
_HEAD: Final = "decoder/logits_dense/kernel"
_LAST_NORM: Final = "decoder/decoder_norm/scale"
_LAYER: Final = re.compile(r"decoder/layers_([0-9]+)/(.+)")
_SCANNED: Final = "decoder/layers/"
_BLOCK: Final = re.compile(r"decoder/layers/layers_([0-9]+)/(.+)")
_REST: Final = re.compile(r"decoder/layers_remainder/layers_([0-9]+)/(.+)")
_PAIR: Final = ("_local", "_global")

_PRE_NORMS: Final = {
    "input_layernorm": "pre_self_attention_layer_norm",
    "post_attention_layernorm": "post_self_attention_layer_norm",
}
_SANDWICH_NORMS: Final = {
    "input_layernorm": "pre_self_attention_norm",
    "attention_output_norm": "post_self_attention_norm",
    "post_attention_layernorm": "pre_ffw_norm",
    "mlp_output_norm": "post_ffw_norm",
}
_QK_NORMS: Final = {
    "self_attn/q_norm": "self_attention/query_norm",
    "self_attn/k_norm": "self_attention/key_norm",
}
_MLP: Final = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
_EXPERTS: Final = ("MoeBlock_0", "moe_block")

_FAMILIES: Final = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
        *("gemma2", "gemma3_text"),
    }
)
_EVERY: Final = {"gemma2": 2, "gemma3_text": 6}
"""Layers that a scan repeats together."""


def _groups(shapes: Mapping[str, Shape]) -> list[LayerGroup]:
    """Return where the layers of a tree lie.

    Raises:
        ConversionError: there are none, or their arrays have no axis that counts them.
    """
    width = shapes[_EMBEDDING][-1]
    paired = any(part.endswith(_PAIR) for path in shapes for part in path.split("/"))
    blocks = {int(match[1]) for path in shapes if (match := _BLOCK.fullmatch(path))}
    rest = sorted({int(match[1]) for path in shapes if (match := _REST.fullmatch(path))})
    alone = sorted({int(match[1]) for path in shapes if (match := _LAYER.fullmatch(path))})
    if blocks:
        axis, count = _stacked(shapes, f"{_SCANNED}layers_0/", width)
        every = len(blocks)
        groups = [
            LayerGroup(f"{_SCANNED}layers_{block}", tuple(range(block, count * every, every)), axis)
            for block in range(every)
        ]
        return groups + [
            LayerGroup(f"decoder/layers_remainder/layers_{number}", (count * every + number,))
            for number in rest
        ]
    if any(path.startswith(_SCANNED) for path in shapes):
        axis, count = _stacked(shapes, _SCANNED, width)
        if not paired:
            return [LayerGroup(_SCANNED.rstrip("/"), tuple(range(count)), axis)]
        return [
            LayerGroup(_SCANNED.rstrip("/"), tuple(range(kind, 2 * count, 2)), axis, suffix)
            for kind, suffix in enumerate(_PAIR)
        ]
    if not alone:
        raise _unknown("layers below decoder/layers or decoder/layers_0", "none")
    if not paired:
        return [LayerGroup(f"decoder/layers_{number}", (number,)) for number in alone]
    return [
        LayerGroup(f"decoder/layers_{number}", (2 * number + kind,), None, suffix)
        for number in alone
        for kind, suffix in enumerate(_PAIR)
    ]


def _stacked(shapes: Mapping[str, Shape], prefix: str, width: int) -> tuple[int, int]:
    """Return the axis that counts the layers of a scan, and their number."""
    norms = [
        shape
        for path, shape in shapes.items()
        if path.startswith(f"{prefix}pre_self_attention") and path.endswith("/scale")
    ]
    axis = scan_axis(norms[0], (width,)) if norms else None
    if axis is None:
        raise _unknown(
            f"{prefix}pre_self_attention…/scale with one axis beside the width {width}",
            str(norms[0]) if norms else "none",
        )
    return axis, norms[0][axis]


def _unknown(expected: str, found: str) -> ConversionError:
    return ConversionError(
        path="a tree of MaxText",
        expected=expected,
        found=found,
        next_step="adopt the folder with a map of your own (--config and --map), or report the "
        "tree: cairn tensors prints it",
    )


def _read(shapes: Mapping[str, Shape]) -> Reading:
    groups = _groups(shapes)
    first = groups[0]

    def inner(path: str) -> Shape | None:
        """Return the shape of a leaf in one layer."""
        shape = shapes.get(first.path(path))
        if shape is None or first.axis is None:
            return shape
        return (*shape[: first.axis], *shape[first.axis + 1 :])

    query, key = inner("self_attention/query/kernel"), inner("self_attention/key/kernel")
    blocks = [name for name in _EXPERTS if inner(f"{name}/gate/kernel")]
    gate = inner(f"{blocks[0]}/wi_0") if blocks else inner("mlp/wi_0/kernel")
    if query is None or key is None or gate is None or len(query) != 3 or len(key) != 3:
        raise _unknown(
            "self_attention/query and key with kernels [width, heads, head size], and an MLP "
            "with wi_0",
            f"query {query}, key {key}, MLP {gate}",
        )
    vocabulary, width = shapes[_EMBEDDING]
    biased = inner("self_attention/query/bias") is not None
    sandwich = inner("pre_ffw_norm/scale") is not None
    normed = inner("self_attention/query_norm/scale") is not None
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": gate[-1],
        "num_hidden_layers": 1 + max(number for group in groups for number in group.numbers),
        "num_attention_heads": query[1],
        "num_key_value_heads": key[1],
        "head_dim": query[2],
        "tie_word_embeddings": _HEAD not in shapes,
    }
    if sandwich:
        model_types: tuple[str, ...] = ("gemma3_text",) if normed else ("gemma2",)
    elif blocks:
        sizes["num_experts" if normed else "num_local_experts"] = gate[0]
        if normed:
            sizes["moe_intermediate_size"] = gate[-1]
        model_types = ("qwen3_moe",) if normed else ("mixtral",)
    elif biased:
        model_types = ("qwen2",)
    else:
        model_types = ("qwen3",) if normed else ("llama", "mistral")
    scanned = "unscanned" if first.axis is None else f"scanned along axis {first.axis}"
    return Reading(sizes, scanned, model_types)


def _scaled_queries(config: DecoderConfig) -> float | None:
    """Return the factor that is in the queries' weights; None: attention applies it."""
    if config.qk_norm is not None or config.model_type in ("qwen2", "gemma3_text"):
        return None
    return config.attention_scale or config.head_size**-0.5


def _turn_in_pairs(config: DecoderConfig, pairs: bool | None) -> bool:
    """Return whether neighbouring dimensions turn together: in models called llama3.1."""
    if pairs is not None:
        return pairs
    return config.rope is not None and config.rope.scaling == "llama3"


def _rules(config: DecoderConfig, shapes: Mapping[str, Shape], pairs: bool | None) -> RuleTable:
    return _table(config, _groups(shapes), shapes, pairs)


def _layout(config: DecoderConfig, scan: bool) -> RuleTable:
    """Return the rules of a tree that MaxText would store.

    Raises:
        ConversionError: MaxText has no such decoder, or can't scan its layers.
    """
    if config.model_type not in _FAMILIES:
        raise ConversionError(
            path="MaxText",
            expected=f"a model of one of {', '.join(sorted(_FAMILIES))}",
            found=config.model_type,
        )
    return _table(config, _new_groups(config, scan), {}, None)


def _new_groups(config: DecoderConfig, scan: bool) -> list[LayerGroup]:
    """Return where MaxText would store the layers of a model."""
    count, kind = config.num_hidden_layers, config.model_type
    every = _EVERY.get(kind, 1)
    if (scan and count < every) or (kind == "gemma2" and count % every):
        raise ConversionError(
            path=f"MaxText, {kind}",
            expected="pairs of layers" if kind == "gemma2" else f"{every} layers or more to scan",
            found=f"{count} layers",
        )
    if kind == "gemma2":
        if not scan:
            return [
                LayerGroup(f"decoder/layers_{number // 2}", (number,), None, _PAIR[number % 2])
                for number in range(count)
            ]
        return [
            LayerGroup(_SCANNED.rstrip("/"), tuple(range(first, count, 2)), 1, suffix)
            for first, suffix in enumerate(_PAIR)
        ]
    if not scan:
        return [LayerGroup(f"decoder/layers_{number}", (number,)) for number in range(count)]
    if every == 1:
        return [LayerGroup(_SCANNED.rstrip("/"), tuple(range(count)), 1)]
    whole = count // every * every
    groups = [
        LayerGroup(f"{_SCANNED}layers_{block}", tuple(range(block, whole, every)), 1)
        for block in range(every)
    ]
    return groups + [
        LayerGroup(f"decoder/layers_remainder/layers_{number - whole}", (number,))
        for number in range(whole, count)
    ]


def _table(
    config: DecoderConfig,
    groups: list[LayerGroup],
    shapes: Mapping[str, Shape],
    pairs: bool | None,
) -> RuleTable:
    offset: tuple[Op, ...] = (Plus(1.0),) if config.norm == "rms_offset" else ()
    turning = _turn_in_pairs(config, pairs)
    scale = _scaled_queries(config)
    names = (_SANDWICH_NORMS if config.block == "sandwich" else _PRE_NORMS) | _QK_NORMS
    leaves = [
        StoredLeaf((f"{path}/scale",), f"{names.get(path, path)}/scale", offset)
        for path in norms_of(config)
    ]
    heads = {"q": config.num_attention_heads, "k": config.kv_heads, "v": config.kv_heads}
    for name, stored in (("q", "query"), ("k", "key"), ("v", "value")):
        scaled: tuple[Op, ...] = (Times(scale),) if name == "q" and scale is not None else ()
        turned = turning and name != "v"
        ours = f"self_attn/{name}_proj"
        ops = scaled + head_ops(config, heads[name], axis=1, pairs=turned)
        leaves.append(StoredLeaf((f"{ours}/kernel",), f"self_attention/{stored}/kernel", ops))
        if config.attention_bias:
            ops = scaled + head_ops(config, heads[name], axis=0, pairs=turned)
            leaves.append(StoredLeaf((f"{ours}/bias",), f"self_attention/{stored}/bias", ops))
    merged = (Merge((config.num_attention_heads, config.head_size)),)
    leaves.append(StoredLeaf(("self_attn/o_proj/kernel",), "self_attention/out/kernel", merged))
    if config.attention_out_bias:
        leaves.append(StoredLeaf(("self_attn/o_proj/bias",), "self_attention/out/bias"))
    if config.experts is None:
        leaves += [
            StoredLeaf((f"mlp/{ours}/kernel",), f"mlp/{stored}/kernel")
            for ours, stored in _MLP.items()
        ]
    else:
        moe = _EXPERTS[0] if config.qk_norm is None else _EXPERTS[1]
        leaves.append(StoredLeaf(("mlp/router/kernel",), f"{moe}/gate/kernel"))
        leaves += [
            StoredLeaf((f"mlp/experts/{ours}/kernel",), f"{moe}/{stored}")
            for ours, stored in _MLP.items()
        ]
    rows = config.vocab_size
    embedded = padded(rows, shapes.get(_EMBEDDING))
    if config.embedding_scale != 1.0:
        embedded = (*embedded, Times(config.embedding_scale))
    rules = [Rule.one("model/embed_tokens/embedding", _EMBEDDING, chained(embedded))]
    rules += group_rules(groups, leaves)
    rules.append(Rule.one("model/norm/scale", _LAST_NORM, chained(offset)))
    if not config.tie_word_embeddings:
        head = padded(rows, shapes.get(_HEAD), 1)
        rules.append(Rule.one("lm_head/kernel", _HEAD, chained(head)))
    return RuleTable(tuple(rules))


def _assumed(config: DecoderConfig, pairs: bool | None) -> tuple[str, ...]:
    assumed = []
    if pairs is None and config.qk_norm is None and config.block == "pre":
        turning = "neighbouring dimensions turn" if _turn_in_pairs(config, None) else "halves turn"
        assumed.append(
            f"rotary positions: {turning}, as in models "
            f"{'' if _turn_in_pairs(config, None) else 'not '}called llama3.1"
        )
    if scale := _scaled_queries(config):
        assumed.append(f"the queries' weights have the factor {scale:.6g} of attention in them")
    return tuple(assumed)


def _tied_head(config: DecoderConfig) -> HeadRounding:
    """Return what MaxText's `attend_on_embedding` (layers/embeddings.py) does, whatever `dtype` is.

    For Gemma it stores the embedding times the root of its width, and divides the logits by it.
    """
    gemma = config.model_type in ("gemma2", "gemma3_text")
    return HeadRounding("bfloat16", math.sqrt(config.hidden_size) if gemma else 1.0)


def _settings(folder: str, scan: bool) -> str:
    return f"load_parameters_path={folder} scan_layers={str(scan).lower()}"


TRAINER = Trainer(
    "maxtext",
    _EMBEDDING,
    _read,
    _rules,
    _assumed,
    tied_head=_tied_head,
    layout=TreeLayout("items", "params/params/", _layout, _settings),
)
