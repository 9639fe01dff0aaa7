"""A small sweep: trains a byte-level Llama with each of some learning rates, a run for each.

Run by the demo as its own process; prints one JSON object at its end.
"""

import argparse
import json
import os
from typing import Any

RATES = (1e-4, 1e-3, 1e-2)
STEPS, SAVE_EVERY = 30, 5
LENGTH, BATCH = 64, 8


def name_of(rate: float) -> str:
    """Returns the name of the run with a learning rate."""
    return f"sweep-lr-{rate:g}"


def main() -> None:
    """Trains the runs one after the other; the last line has the last loss of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="URI of the root to save to")
    root = parser.parse_args().root
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from cairn import (
        DecoderConfig,
        DecoderForCausalLM,
        EasyDeLState,
        Run,
        make_optimizer,
    )
    from examples.demo.corpus import documents

    config = DecoderConfig(
        model_type="llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    text = np.frombuffer(documents().encode(), np.uint8)
    unseen = len(text) * 9 // 10

    @jax.jit
    def train_step(state: EasyDeLState, ids: jax.Array) -> tuple[EasyDeLState, jax.Array]:
        def loss_of(parameters: Any) -> jax.Array:
            loss: jax.Array = state.merge(parameters)(input_ids=ids, labels=ids).loss
            return loss

        loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    def batch(numbers: np.random.Generator, first: int, last: int) -> jax.Array:
        starts = numbers.integers(first, last - LENGTH, BATCH)
        return jnp.asarray(np.stack([text[at : at + LENGTH] for at in starts]), jnp.int32)

    def train(rate: float) -> float:
        uri = f"{root}/{name_of(rate)}"
        Run.create(uri, labels={"sweep": "learning-rate", "learning_rate": f"{rate:g}"})
        tx, tx_init = make_optimizer("adamw", learning_rate=rate)
        model = DecoderForCausalLM(config, rngs=nnx.Rngs(0))
        state = EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)
        numbers = np.random.default_rng(0)
        held_out = batch(np.random.default_rng(1), unseen, len(text))
        for step in range(1, STEPS + 1):
            state, loss = train_step(state, batch(numbers, 0, unseen))
            if step % SAVE_EVERY == 0:
                # The same program tells the loss on unseen text; what it learns of it is dropped.
                _, evaluated = train_step(state, held_out)
                metrics = {"loss": float(loss), "eval/loss": float(evaluated)}
                save = state.save_state(
                    uri,
                    step=step,
                    metrics=metrics,
                    better={"loss": "min", "eval/loss": "min"},
                    labels={"phase": "warm-up" if step < 10 else "main"},
                    extras={"batch": BATCH, "length": LENGTH},
                    verbose=False,
                )
        save.wait()
        return metrics["eval/loss"]

    print(json.dumps({name_of(rate): train(rate) for rate in RATES}), flush=True)


if __name__ == "__main__":
    main()
