"""GGUF files of any family, made of a folder of transformers as llama.cpp's converter makes them.

Names are those of the package `gguf`; what the converter changes in tensors and says in metadata
is written here once more, and not taken from our tables.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.interop.families.matrix import tensors_of

Tensor = np.ndarray[Any, Any]
Config = Mapping[str, Any]
F32 = gguf.GGMLQuantizationType.F32

ARCHITECTURES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""Of families whose architecture is not called as they are."""


def write_gguf(
    path: Path,
    folder: Path,
    *,
    quantization: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    without: tuple[str, ...] = (),
    tensors: Mapping[str, Tensor] | None = None,
    **metadata: Any,
) -> Path:
    """A folder's model.

    Args:
        path: of the file.
        folder: config.json and safetensors.
        quantization: ends of tensors' names -> their types; others are float32.
        without: keys of the architecture, without its prefix, that are left out.
        tensors: more of them.
        **metadata: more keys of the architecture, and other values; None is no value.
    """
    config = json.loads((folder / "config.json").read_text())
    model_type = config["model_type"]
    architecture = ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, architecture)
    said = {**_metadata(model_type, config), **metadata}
    for key, value in said.items():
        if value is not None and key not in without:
            _add(writer, f"{architecture}.{key}", value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.padding_token_id", 0)
    converted = dict(_converted(model_type, architecture, config, tensors_of(folder)))
    for name, values in {**converted, **(tensors or {})}.items():
        ends = [kind for end, kind in (quantization or {}).items() if name.endswith(end)]
        kind = ends[0] if ends else F32
        data = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _metadata(model_type: str, config: Config) -> dict[str, Any]:
    said = _OWN_METADATA[model_type](config)
    return {"vocab_size": config["vocab_size"], **said}


def _usual(config: Config) -> dict[str, Any]:
    """What the converter says of most."""
    said = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_theta"):
        said["rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        said |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        said["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast")
        said["rope.scaling.yarn_beta_slow"] = rope.get("beta_slow")
    return said


def _head(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _llama(config: Config) -> dict[str, Any]:
    return {**_usual(config), "rope.dimension_count": _head(config)}


def _mistral(config: Config) -> dict[str, Any]:
    return {**_llama(config), "attention.sliding_window": config["sliding_window"]}


def _experts(config: Config) -> dict[str, Any]:
    return {
        **_usual(config),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _gemma(config: Config) -> dict[str, Any]:
    said = _usual(config)
    del said["rope.freq_base"]
    return said


def _gemma2(config: Config) -> dict[str, Any]:
    return {
        **_gemma(config),
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
    }


def _gemma3(config: Config) -> dict[str, Any]:
    local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    return {
        **_usual(config),
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base_swa": float(local),
    }


def _olmo3(config: Config) -> dict[str, Any]:
    return {
        **_usual(config),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config["layer_types"]
        ],
    }


def _phi3(config: Config) -> dict[str, Any]:
    rope, head = config["rope_parameters"], _head(config)
    original = config["original_max_position_embeddings"]
    said = {
        **_usual(config),
        "rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if rope["rope_type"] == "longrope":
        longer = config["max_position_embeddings"] / original
        said["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(longer) / np.log(original)))
    return said


def _gpt2(config: Config) -> dict[str, Any]:
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _gpt_neox(config: Config) -> dict[str, Any]:
    said = _usual(config)
    del said["rope.freq_base"]
    share = config["rope_parameters"]["partial_rotary_factor"]
    return {
        **said,
        "rope.dimension_count": int(share * _head(config)),
        "use_parallel_residual": config["use_parallel_residual"],
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
    }


def _falcon(config: Config) -> dict[str, Any]:
    return {
        "context_length": 2048,
        "tensor_data_layout": "jploski",
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 4 * config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": _falcon_groups(config),
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _falcon_groups(config: Config) -> int:
    return config["num_kv_heads"] if config["new_decoder_architecture"] else 1


def _stablelm(config: Config) -> dict[str, Any]:
    said = _usual(config)
    del said["rope.freq_base"]
    share = config["rope_parameters"]["partial_rotary_factor"]
    return {
        **said,
        "rope.dimension_count": int(share * _head(config)),
        "use_parallel_residual": config["use_parallel_residual"],
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
    }


def _starcoder2(config: Config) -> dict[str, Any]:
    return {**_usual(config), "attention.layer_norm_epsilon": config["norm_epsilon"]}


def _glm4(config: Config) -> dict[str, Any]:
    share = config["rope_parameters"]["partial_rotary_factor"]
    return {**_usual(config), "rope.dimension_count": int(share * _head(config))}


def _glm4_moe(config: Config) -> dict[str, Any]:
    further = config["num_nextn_predict_layers"]
    return {
        **_glm4(config),
        "block_count": config["num_hidden_layers"] + further,
        "nextn_predict_layers": further,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2,
    }


def _granite(config: Config) -> dict[str, Any]:
    return {
        **_llama(config),
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _cohere(config: Config) -> dict[str, Any]:
    return {
        **_usual(config),
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "logit_scale": config["logit_scale"],
        "rope.scaling.type": "none",
    }


def _cohere2(config: Config) -> dict[str, Any]:
    return {
        **_cohere(config),
        "attention.sliding_window": config["sliding_window"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
    }


def _deepseek(config: Config) -> dict[str, Any]:
    rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    rope = config["rope_parameters"]
    third = config["model_type"] == "deepseek_v3"
    said = {
        **_usual(config),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turning,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turning,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turning,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": True if third else None,
        "expert_gating_func": 2 if third else 1,
    }
    if rope.get("mscale_all_dim"):
        said["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return said


def _gpt_oss(config: Config) -> dict[str, Any]:
    return {
        **_usual(config),
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


_OWN_METADATA: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "cohere": _cohere,
    "cohere2": _cohere2,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _llama,
    "olmo2": _usual,
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2": _usual,
    "qwen2_moe": _experts,
    "qwen3": _usual,
    "qwen3_moe": _experts,
    "smollm3": _llama,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}


def _converted(
    model_type: str, architecture: str, config: Config, tensors: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    values = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)
    for name, one in _stacked(values).items():
        for given, array in _changed(model_type, config, name, one):
            found = names.get_name(given, try_suffixes=(".weight", ".bias"))
            assert found is not None, given
            yield found, array


_NUMBERED = re.compile(r"(.*\.(?:experts|norms))\.(\d+)\.(.*)")


def _stacked(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts, and the norms of heads, of one layer in one tensor."""
    found, numbered = {}, defaultdict(dict)
    for name, array in values.items():
        match = _NUMBERED.fullmatch(name)
        if match is None:
            found[name] = array
        else:
            start, number, end = match.groups()
            numbered[f"{start.removesuffix('.norms')}.{end}"][int(number)] = array
    stacks = {
        name: np.stack([one for _, one in sorted(ones.items())]) for name, ones in numbered.items()
    }
    return {**found, **stacks}


def _changed(
    model_type: str, config: Config, name: str, array: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """What the converter makes of one tensor: names of transformers still."""
    if model_type in ("llama", "mistral", "mixtral", "granite", "smollm3"):
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                array = _permuted(array, config[key])
    if model_type.startswith("gemma") and name.endswith("norm.weight"):
        array = array + np.float32(1)
    if model_type == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        array = array.T
    if model_type == "gpt_neox" and "query_key_value" in name:
        each = array.reshape(config["num_attention_heads"], 3, -1, *array.shape[1:])
        array = np.concatenate([each[:, n].reshape(-1, *array.shape[1:]) for n in range(3)])
    if model_type == "falcon" and "query_key_value" in name:
        groups, head = _falcon_groups(config), _head(config)
        each = array.reshape(groups, -1, head, *array.shape[1:])
        cut = (each[:, :-2], each[:, -2], each[:, -1])
        array = np.concatenate([one.reshape(-1, *array.shape[1:]) for one in cut])
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if model_type.startswith("deepseek") and "kv_b_proj" in name:
        each = array.reshape(config["num_attention_heads"], -1, array.shape[1])
        content = config["qk_nope_head_dim"]
        yield name.replace("kv_b_proj", "k_b_proj"), each[:, :content].swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), each[:, content:]
        return
    if model_type == "gpt_oss":
        if name.endswith("sinks"):
            name += ".weight"
        match = re.fullmatch(r"(.*)\.(gate_up|down)_proj(_bias)?", name)
        if match is not None:
            start, part, bias = match.groups()
            end = "bias" if bias else "weight"
            array = array if bias else array.swapaxes(1, 2)
            if part == "down":
                yield f"{start}.down_proj.{end}", array
            else:
                yield f"{start}.gate_proj.{end}", array[:, 0::2]
                yield f"{start}.up_proj.{end}", array[:, 1::2]
            return
    yield name, array


def _permuted(rows: Tensor, heads: int) -> Tensor:
    """Halves of each head -> neighbouring pairs."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)
