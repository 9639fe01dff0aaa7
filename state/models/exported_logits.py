"""Program that computes the logits of a Hugging Face folder on given tokens with `transformers`.

`python -m cairn.state.models.exported_logits FOLDER TOKENS LOGITS` reads tokens from a .npy file,
writes logits to another, and prints the JSON that `write_logits` returns.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import transformers

from cairn.state.models.parent_process import end_with_parent


def write_logits(folder: str, tokens: str, logits: str) -> dict[str, str | list[str]]:
    """Write the logits of tokens to a file, float32 [B, T, V].

    Args:
        folder: the Hugging Face folder.
        tokens: .npy file with token ids [B, T].
        logits: .npy file to write.

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


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(write_logits(*sys.argv[1:])))
