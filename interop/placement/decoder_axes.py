"""Logical axes of the decoder's parameters, by their paths.

With them a checkpoint's leaves can be placed where the model is never built.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["DECODER_AXES", "PACKED", "decoder_axes", "scale_axes"]

Axes = tuple[str | None, ...]

DECODER_AXES: Mapping[str, Axes] = MappingProxyType(
    {
        "embed_tokens": ("vocab", "embed"),
        "embed_positions": ("positions", "embed"),
        "q_proj": ("embed", "heads"),
        "k_proj": ("embed", "kv_heads"),
        "v_proj": ("embed", "kv_heads"),
        "o_proj": ("heads", "embed"),
        "q_a_proj": ("embed", None),
        "q_b_proj": (None, "heads"),
        "kv_a_proj": ("embed", None),
        "kv_b_proj": (None, "heads"),
        "q_norm": ("heads", "norm"),
        "k_norm": ("kv_heads", "norm"),
        "q_a_norm": ("norm",),
        "kv_a_norm": ("norm",),
        "sinks": ("heads",),
        "router": ("embed", "experts"),
        "correction": ("experts",),
        "shared_gate": ("embed", None),
        "gate_proj": ("embed", "mlp"),
        "up_proj": ("embed", "mlp"),
        "down_proj": ("mlp", "embed"),
        "input_layernorm": ("norm",),
        "post_attention_layernorm": ("norm",),
        "attention_output_norm": ("norm",),
        "mlp_output_norm": ("norm",),
        "norm": ("norm",),
        "lm_head": ("embed", "vocab"),
    }
)
"""Layer name -> axes of its weight [in, out], embedding, scale or vector.

Weights of experts [experts, in, out] have one axis more; a scale over one head's dimensions, or
over those of all heads, has only the last axis.
"""

PACKED = ("qvalue", "scale")
"""Names of the arrays of a quantized weight, below `<layer>/kernel/array`."""


def decoder_axes(path: str, shapes: Mapping[str, tuple[int, ...]]) -> Axes | None:
    """Return the logical axis names of a decoder's leaf; None if its path is not a decoder's.

    Args:
        path: path of the leaf.
        shapes: shapes of all leaves, by path.
    """
    keys = path.split("/")
    if keys[-1] in PACKED and keys[-3:-1] == ["kernel", "array"]:
        # Codes of a quantized weight, or their scales.
        axes = DECODER_AXES.get(keys[-4]) if len(keys) > 3 else None
        whole = shapes.get(path.rpartition("/")[0] + "/qvalue")
        if axes is None or whole is None:
            return None
        return axes if keys[-1] == "qvalue" else scale_axes(axes, whole, shapes[path])
    if keys[-1] in DECODER_AXES:
        return DECODER_AXES[keys[-1]]  # a vector: the layer is the leaf
    axes = DECODER_AXES.get(keys[-2]) if len(keys) > 1 else None
    if axes is None:
        return None
    if "experts" in keys:
        axes = ("experts", *axes)
        return {"kernel": axes, "bias": (axes[0], axes[-1])}.get(keys[-1])
    if keys[-1] == "scale":
        return axes[-len(shapes.get(path, axes)) :]
    by_name: dict[str, Axes] = {
        "embedding": axes,
        "kernel": axes,
        "bias": axes[-1:],
        "kernel_lora_a": (axes[0], None),
        "kernel_lora_b": (None, axes[-1]),
    }
    return by_name.get(keys[-1])


def scale_axes(axes: Axes, whole: tuple[int, ...], scale: tuple[int, ...]) -> Axes:
    """Return the axis names of a quantized weight's scales.

    An axis with a scale per group gets a "?": it is split only if the mesh divides it.

    Args:
        axes: axis names of the quantized weight.
        whole: shape of the quantized weight.
        scale: shape of the scales.
    """
    lengths = zip(axes, whole, scale, strict=True)
    return tuple(
        name if count == length or name is None else (f"{name}?" if count > 1 else None)
        for name, length, count in lengths
    )
