"""Program that computes the logits of a Hugging Face folder on given tokens with `transformers`.

`python -m cairn.state.models.exported_logits FOLDER TOKENS LOGITS [DTYPE FACTOR]` reads tokens from
a .npy file, writes logits to another, and prints the JSON that `write_logits` returns.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import transformers

from cairn.state.models.parent_process import end_with_parent


def write_logits(
    folder: str, tokens: str, logits: str, head_dtype: str = "", factor: str = "1"
) -> dict[str, str | list[str]]:
    """Write the logits of tokens to a file, float32 [B, T, V].

    Args:
        folder: the Hugging Face folder.
        tokens: .npy file with token ids [B, T].
        logits: .npy file to write.
        head_dtype: dtype that the tied output head is rounded to; "": it stays as it is.
        factor: see `round_tied_head`.

    Returns:
        `computed_by`: versions of transformers and torch. `problems`: tensors that are missing,
        unexpected or of a wrong shape; transformers replaces those by random ones.
    """
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="eager",
        output_loading_info=True,
    )
    model.eval()
    if head_dtype:
        round_tied_head(model, head_dtype, float(factor))
    with torch.no_grad():
        computed = model(torch.from_numpy(np.load(tokens)), use_cache=False).logits
    np.save(logits, computed.to(torch.float32).numpy())
    return {
        "computed_by": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "problems": [
            f"{name}: {kind.removesuffix('_keys')}"
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            for name in sorted(map(str, loading[kind]))
        ],
    }


def round_tied_head(model: Any, dtype: str, factor: float) -> None:
    """Give a model a head of its own, its embedding rounded; the embedding stays as it is.

    Args:
        model: a model of transformers.
        dtype: dtype of torch, such as "bfloat16".
        factor: factor that the embedding has while it is rounded.
    """
    embedding = factor * model.get_input_embeddings().weight.detach()
    rounded = embedding.to(getattr(torch, dtype)).to(torch.float32) / factor
    model.get_output_embeddings().weight = torch.nn.Parameter(rounded)


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(write_logits(*sys.argv[1:])))
