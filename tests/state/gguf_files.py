"""Small GGUF files, written by the `gguf` package as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cairn.interop.weights.files import open_pretrained

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_llama(
    path: Path,
    model: Any,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_divisors: np.ndarray[Any, Any] | None = None,
    alignment: int | None = None,
    **metadata: Any,
) -> Path:
    """A transformers Llama as a GGUF file; matrices in `quantization`."""
    config = model.config
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for key, value in metadata.items():
        writer.add_string(f"llama.{key}", value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        for letter, count in heads.items():
            if f"{letter}_proj" in name:
                values = _interleaved(values, count)
        kept = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else quantization
        data = gguf.quants.quantize(np.ascontiguousarray(values), kept)
        writer.add_tensor(_their_name(name), data, raw_dtype=kept)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to rotated rows."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def _their_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_NAMES[stem]}.{kind}"


def opened(path: Path) -> Any:
    """Return a file's tensors, metadata and config, opened as `from_pretrained` opens them."""
    return open_pretrained(path).gguf
