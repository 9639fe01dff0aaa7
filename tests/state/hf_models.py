"""Random tiny models of transformers, as folders, and ours loaded from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A Llama with grouped heads and heads that are not hidden / heads wide.

    Weights are large, so that a wrong one shows in the logits; norms and biases are not left at
    their initial ones and zeros.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "vocab_size": 96,
            "intermediate_size": 48,
            "initializer_range": 0.3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            **options,
        }
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """The model's folder."""
    model.save_pretrained(folder, **options)
    return folder


def tokens(batch: int, length: int, vocabulary: int = 96, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(3, vocabulary, (batch, length)).astype(np.int32)


def torch_logits(model: Any, ids: np.ndarray[Any, Any], mask: Any = None) -> np.ndarray[Any, Any]:
    """Logits of the torch model, float32."""
    with torch.no_grad():
        given = None if mask is None else torch.tensor(np.asarray(mask)).long()
        logits = model(torch.tensor(ids).long(), attention_mask=given).logits
    return logits.float().numpy()
