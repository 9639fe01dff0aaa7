"""Fine-tunes SmolLM2-135M with low-rank adapters on a base in four bits (QLoRA).

The base is quantized to NormalFloat 4 and frozen; only the adapters are trained, saved often, and
exported for PyTorch's `peft`.

    python -m examples.lora_finetune [FILE]

FILE is another GGUF file to begin with.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cairn import DecoderForCausalLM, EasyDeLState, make_optimizer
from examples.checks import check, say
from examples.demo.corpus import Batches
from examples.demo.weights import carried_tokenizer, smollm2_gguf

RANK, ALPHA, STEPS, BATCH, LENGTH = 8, 16, 4, 4, 32
LAYERS = r"(q_proj|v_proj)$"


def train_step(state: EasyDeLState, batch: jax.Array) -> tuple[EasyDeLState, jax.Array]:
    """One step; `graphstate` are the adapters alone, so that the gradients are theirs."""

    def loss_of(adapters: Any) -> jax.Array:
        loss: jax.Array = state.merge(adapters)(input_ids=batch, labels=batch).loss
        return loss

    loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
    return state.apply_gradients(grads=grads), loss


def main() -> None:
    """Loads, adapts, trains, saves, restores, exports and generates."""
    file = Path(sys.argv[1]) if sys.argv[1:] else smollm2_gguf()
    model = DecoderForCausalLM.from_pretrained(file, config_kwargs={"scan_layers": True})
    tokenizer = carried_tokenizer(model.config.tokenizer_files)
    say(f"{file.stem}: {model.num_parameters / 1e6:.1f} M parameters")
    before = sum(leaf.nbytes for leaf in jax.tree.leaves(model.split_params()))
    model.quantize("nf4", group_size=64)
    after = sum(leaf.nbytes for leaf in jax.tree.leaves(model.split_params()))
    say(f"{before / 1e6:.0f} MB in float32, {after / 1e6:.0f} MB in nf4 (embeddings stay floating)")
    model.apply_lora_to_layers(RANK, ALPHA, LAYERS)
    tx, tx_init = make_optimizer("adamw", learning_rate=2e-3)
    state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.graphstate))
    say(f"{trained / 1e6:.2f} M parameters are trained")

    step_fn = jax.jit(train_step, donate_argnums=0)
    batch = jnp.asarray(Batches(tokenizer, batch=BATCH, length=LENGTH)[0])
    losses = []
    for step in range(1, STEPS + 1):
        state, loss = step_fn(state, batch)
        losses.append(float(loss))
        say(f"step {step}  loss {losses[-1]:.4f}")
    check("the loss falls", losses[-1] < losses[0] - 0.1, f"{losses[0]:.3f}, {losses[-1]:.3f}")
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/smollm2-lora"
        save = state.save_state(run, metrics={"loss": losses[-1]}, verbose=False)
        save.wait()
        say(f"saved; training waited {save.blocked_seconds:.3f} s")
        again = EasyDeLState.load_state(run, verbose=False)
        check(
            "restored with quantized base, adapters and optimizer, bit for bit",
            bit_equal((again.graphstate, again.graphother, again.opt_state), state),
            f"step {int(again.step)}",
        )
        export(again.model, f"{folder}/adapter", tokenizer)


def bit_equal(restored: tuple[Any, ...], state: EasyDeLState) -> bool:
    """Says whether a restored state has the bits of the one that was saved."""
    saved = (state.graphstate, state.graphother, state.opt_state)
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@nnx.jit
def logits_of(model: Any, ids: jax.Array) -> jax.Array:
    """Returns logits (batch, tokens, vocabulary)."""
    logits: jax.Array = model(input_ids=ids).logits
    return logits


def export(model: Any, folder: str, tokenizer: Any) -> None:
    """Generates a text, writes the adapters for `peft`, and compares with what that computes."""
    prompt = tokenizer("A checkpoint is", return_tensors="np")["input_ids"].astype(np.int32)
    generated = np.asarray(model.generate(jnp.asarray(prompt), max_new_tokens=8).sequences)[0]
    text = tokenizer.decode(generated, skip_special_tokens=True)
    check("the model writes", len(generated) > prompt.shape[1], repr(text))

    ours = np.asarray(logits_of(model, jnp.asarray(prompt)))
    files = model.save_adapter(folder)
    nbytes = sum((Path(folder) / name).stat().st_size for name in files)
    say(f"{', '.join(files)}: {nbytes / 1e6:.1f} MB")
    try:
        import peft
        import torch
    except ImportError:
        say("peft is not installed: the export is not compared")
        return
    # Adapters of nothing, merged, leave the base as PyTorch needs it: floating.
    _, adapters = model.split_lora_params()
    model.merge_lora_params(jax.tree.map(jnp.zeros_like, adapters)).unwrap_lora_to_layers()
    theirs = peft.PeftModel.from_pretrained(model.to_pytorch(), folder).eval()
    with torch.no_grad():
        found = theirs(torch.from_numpy(prompt.astype(np.int64))).logits.numpy()
    difference = np.abs(found - ours).max() / np.abs(ours).max()
    check("peft computes the same", difference < 1e-4, f"{difference:.1e} of the largest logit")


if __name__ == "__main__":
    main()
