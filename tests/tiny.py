"""A tiny Llama and a run of it, shaped like the demo's: eight devices, dp=2 x fsdp=4, AdamW."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cairn import DecoderConfig, DecoderForCausalLM, EasyDeLState, make_optimizer
from cairn.state.checkpointing.trees import flatten

TINY = DecoderConfig(
    model_type="llama",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    sharding_axis_dims=(2, 4, 1, 1),
)


@dataclass(frozen=True)
class TinyRun:
    """A run with steps 1 and 2, and what was saved as step 2.

    Attributes:
        uri: of the run.
        root: folder or URI of the store root.
        leaves: item -> path -> value, of step 2.
        losses: exact losses of steps 1, 2 and 3.
        final: leaves after step 3, which was not saved.
    """

    root: str
    uri: str
    leaves: dict[str, dict[str, np.ndarray]]
    losses: list[float]


def batch(position: int) -> np.ndarray:
    """Batch `position` of the tiny run: int32 [8, 16]."""
    return np.random.default_rng(position).integers(0, TINY.vocab_size, (8, 16)).astype(np.int32)


def make_state() -> EasyDeLState:
    """A fresh sharded state."""
    model = DecoderForCausalLM(TINY, rngs=nnx.Rngs(0))
    model.shard_model()
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2)
    return EasyDeLState.create(model=model, tx=tx, tx_init=tx_init, init_opt_state=True)


def compile_step(state: EasyDeLState) -> Any:
    """The jitted training step for states placed like this one."""

    def train_step(state: EasyDeLState, ids: jax.Array) -> tuple[EasyDeLState, jax.Array]:
        def loss_of(parameters: Any) -> jax.Array:
            return state.merge(parameters)(input_ids=ids, labels=ids).loss

        loss, grads = jax.value_and_grad(loss_of)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    return jax.jit(train_step, donate_argnums=0, out_shardings=(state.shardings, None))


def leaves_of(state: EasyDeLState) -> dict[str, dict[str, np.ndarray]]:
    """Host copies of everything that a save of this state stores."""
    model = {**flatten(nnx.to_pure_dict(state.graphother)), **flatten(state.params)}
    items = {"model": model, "optimizer": flatten(state.opt_state)}
    return {
        item: {path: np.array(leaf, copy=True) for path, leaf in leaves.items()}
        for item, leaves in items.items()
    }


def make_run(root: str, name: str = "tiny") -> TinyRun:
    """Trains three steps and saves the first two, without waiting in between."""
    uri = f"{root}/{name}"
    state = make_state()
    step_fn = compile_step(state)
    losses, leaves = [], {}
    for step in (1, 2, 3):
        state, loss = step_fn(state, jnp.asarray(batch(step - 1)))
        losses.append(float(loss))
        if step < 3:
            if step == 2:
                leaves = leaves_of(state)
            handle = state.save_state(uri, extras={"position": step}, verbose=False)
    handle.wait()
    return TinyRun(root=root, uri=uri, leaves=leaves, losses=losses)
