"""What users of other programs reported, as small inputs made by us: a line for each.

`after` names the public report, or the model whose published file is so. An input is, by kind:

- config: keys that a config.json has beside those of its family.
- header: a safetensors header (bytes: the whole file).
- adapter: keys that an adapter_config.json of PEFT has beside those of plain LoRA.
- generation: a generation_config.json.
- tree: a tree that a training job saves; a load into its shapes gives it back.
"""

from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

ENTRY: Final = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


class Report(NamedTuple):
    """An input and what is right: `loads`, or is `refused` or `warns` with `text`."""

    name: str
    after: str
    kind: Literal["config", "header", "adapter", "generation", "tree"]
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


class Dropped(nnx.Module):
    """Model with a list of layers and a dropout, whose random key is part of its state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


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
    Report("keys of a newer PEFT", "huggingface/peft#2275", "adapter",
           {"eva_config": None, "exclude_modules": None, "lora_bias": False}, "loads"),
    Report("keys that Unsloth writes", "oobabooga/textgen#6819", "adapter",
           {"corda_config": None, "trainable_token_indices": None, "lora_bias": False}, "loads"),
    Report("layers that are repeated", "huggingface/peft#1979", "adapter",
           {"layer_replication": [[0, 2], [1, 3]]}, "refused", "layer_replication="),
    Report("a model's config in its place", "huggingface/peft#1661", "adapter",
           {"_name_or_path": "org/base", "num_layers": 28}, "refused", "num_layers=28"),
    Report("magnitudes beside A and B", "huggingface/peft#1474", "adapter", {"use_dora": True},
           "refused", "use_dora=True"),
    Report("several ends of a text", "turboderp-org/exllamav2#449", "generation",
           {"eos_token_id": [3, 5]}, "loads"),
    Report("a list of one end", "ggml-org/llama.cpp#9606", "generation", {"eos_token_id": [3]},
           "loads"),
    Report("random keys in a model", "google/orbax#2540", "tree",
           nnx.state(Dropped(nnx.Rngs(0))), "loads"),
    Report("keys that are numbers", "google/orbax#2561", "tree",
           {0: np.ones(2, np.float32), 1: {10: np.zeros(3, np.int32)}}, "loads"),
    Report("norms by channel", "google/orbax#1305", "tree",
           {"data": {3: {"mean": np.float32(1), "seen": 7}}}, "loads"),
    Report("a random key by itself", "google/orbax#1105", "tree",
           {"key": jax.random.key(3), "old": jax.random.PRNGKey(3)}, "loads"),
]  # fmt: skip
