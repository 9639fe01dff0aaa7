"""A program: the logits of a stored model on given tokens, computed by Cairn.

`python -m cairn.state.models.stored_logits RUN TOKENS LOGITS DTYPE`, of a step ("run/steps/N"), two
.npy files, and the dtype that the weights are rounded to first ("native": none). On stdout: JSON.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from cairn.state.models.base import EasyDeLBaseModule
from cairn.state.models.parent_process import end_with_parent


def write_logits(run: str, tokens: str, logits: str, dtype: str) -> dict[str, str | bool]:
    """Write the logits [B, T, V] of tokens [B, T], float32, and say what computed them."""
    model = EasyDeLBaseModule.from_pretrained(
        run, dtype=jnp.float32, param_dtype=None, precision="highest", auto_shard_model=False
    )
    adapted = model.is_quantized or model.lora_is_enabled
    if model.is_quantized:
        model = model.dequantize()
    if model.lora_is_enabled:
        model = model.unwrap_lora_to_layers()
    if dtype != "native":
        model = model.to_dtype(dtype)
    model.eval()
    np.save(logits, np.asarray(model(jnp.asarray(np.load(tokens))).logits, np.float32))
    return {"computed_by": f"jax {jax.__version__}", "adapted": adapted}


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(write_logits(*sys.argv[1:])))
