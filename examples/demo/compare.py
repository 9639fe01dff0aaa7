"""Loads the export in transformers and the checkpoint in ours; compares logits and completions."""

import argparse
import json
import os


def main() -> None:
    """Prints one JSON object with the differences and both completions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--export", required=True, help="local folder with the Hugging Face files")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=8)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import jax.numpy as jnp
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cairn import EasyDeLState

    tokenizer = AutoTokenizer.from_pretrained(arguments.export)
    theirs = AutoModelForCausalLM.from_pretrained(arguments.export, dtype=torch.float32).eval()
    ours = EasyDeLState.load_state(arguments.checkpoint, optimizer="skip", verbose=False).model
    ids = tokenizer(arguments.prompt, return_tensors="np")["input_ids"].astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    found = np.asarray(ours(input_ids=jnp.asarray(ids)).logits)
    with torch.no_grad():
        their_ids = theirs.generate(
            torch.from_numpy(ids.astype(np.int64)), max_new_tokens=arguments.tokens, do_sample=False
        )[0]
    completed = ours.generate(jnp.asarray(ids), max_new_tokens=arguments.tokens)
    our_ids = np.asarray(completed.sequences)[0]
    print(
        json.dumps(
            {
                "difference": float(np.abs(expected - found).max()),
                "scale": float(np.abs(expected).max()),
                "theirs": tokenizer.decode(their_ids, skip_special_tokens=True),
                "ours": tokenizer.decode(our_ids, skip_special_tokens=True),
            }
        )
    )


if __name__ == "__main__":
    main()
