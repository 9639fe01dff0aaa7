"""What users of other programs reported, as small inputs made by us: a line for each.

`after` names the public report, or the model whose published file is so. An input is the keys that
a config.json has beside those of its family, or a safetensors header (bytes: the whole file).
"""

from typing import Any, Final, Literal, NamedTuple

ENTRY: Final = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


class Report(NamedTuple):
    """An input and what is right: `loads`, or is `refused` or `warns` with `text`."""

    name: str
    after: str
    kind: Literal["config", "header"]
    value: Any
    outcome: Literal["loads", "refused", "warns"]
    text: str = ""
    family: str = ""


def config(
    name: str,
    after: str,
    family: str,
    keys: dict[str, Any],
    outcome: Literal["loads", "refused", "warns"],
    text: str = "",
) -> Report:
    """A line about a config.json."""
    return Report(name, after, "config", keys, outcome, text, family)


POINTER: Final = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\n"

REPORTS: Final = [
    config("no mrope", "Qwen2.5-0.5B", "qwen2", {"use_mrope": False}, "loads"),
    config(
        "mrope",
        "huggingface/transformers#33401",
        "qwen2",
        {"use_mrope": True},
        "refused",
        "the positions that turn queries and keys",
    ),
    config("two activations", "NVIDIA-NeMo/Megatron-Bridge#4661", "gemma2",
           {"hidden_act": "gelu"}, "loads"),
    config("both directions", "llm2vec models", "qwen2", {"is_causal": False}, "refused",
           "which tokens attend to which"),
    config("packed by MLX", "mlx-community models", "qwen2", {"quantization": {"bits": 4}},
           "refused", "the weights, which MLX has packed"),
    config("another name of biases", "Qwen3-Coder-30B-A3B", "qwen3_moe", {"qkv_bias": True},
           "refused", "attention_bias says whether there are biases"),
    config("a shared expert", "Qwen3-Coder-30B-A3B", "qwen3_moe",
           {"shared_expert_intermediate_size": 8}, "refused", "no layer has a shared expert"),
    config("no norms of heads", "Qwen3-Coder-30B-A3B", "qwen3_moe", {"use_qk_norm": False},
           "refused", "queries and keys are normalised"),
    config("biases of the MLP", "Mistral-7B", "mistral", {"mlp_bias": True}, "refused",
           "the MLP has no biases"),
    config("a key of nobody", "any", "llama", {"never_seen": 1}, "refused", "nothing reads it"),
    config("dropout of training", "SmolLM", "llama", {"attention_dropout": 0.1}, "warns",
           "attention_dropout=0.1: the decoder has none of it"),
    Report("metadata is null", "safetensors/safetensors#823", "header",
           {"__metadata__": None, "a": ENTRY}, "loads"),
    Report("metadata is empty", "foundation-model-stack/fastsafetensors#89", "header",
           {"__metadata__": {}, "a": ENTRY}, "loads"),
    Report("no metadata", "ml-explore/mlx#743", "header", {"a": ENTRY}, "loads"),
    Report("more fields of a tensor", "safetensors", "header",
           {"a": ENTRY | {"stride": [1], "note": {"by": None}}}, "loads"),
    Report("a pointer of Git LFS", "huggingface/transformers#27923", "header", POINTER,
           "refused", "a pointer of Git LFS to it: run git lfs pull"),
]  # fmt: skip
