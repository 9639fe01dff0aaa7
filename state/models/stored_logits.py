"""Program that computes the logits of a stored model on given tokens, with Cairn.

`python -m cairn.state.models.stored_logits RUN TOKENS LOGITS DTYPE` reads the step RUN
("run/steps/N") and tokens from a .npy file, casts the weights to DTYPE ("native": no cast), writes
logits to another .npy file, and prints the JSON that `write_logits` returns.
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
    """Write the logits of tokens to a file, float32 [B, T, V].

    Args:
        run: the step, such as "run/steps/N".
        tokens: .npy file with token ids [B, T].
        logits: .npy file to write.
        dtype: dtype to cast the weights to first; "native" for none.

    Returns:
        `computed_by`: version of JAX. `adapted`: whether the model is quantized or has adapters.
    """
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
