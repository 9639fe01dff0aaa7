"""A Linen model with batch statistics: a subclass of `TrainState` carries them along.

The added fields, `batch_stats` and `epoch`, are saved and restored like the parameters, and change
only when `apply_gradients` gets new values for them.
"""

import os
import tempfile
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

from cairn import TrainState, TrainStep
from examples.checks import check, say

BATCH, EPOCHS, STEPS = 64, 3, 12


class Network(linen.Module):
    """A small image classifier with batch normalization."""

    @linen.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits (batch, 4) of images (batch, 8, 8, 1)."""
        hidden = linen.Conv(8, (3, 3), use_bias=False)(images)
        hidden = linen.BatchNorm(use_running_average=not train, momentum=0.9)(hidden)
        hidden = linen.relu(hidden).reshape(images.shape[0], -1)
        return linen.Dense(4)(hidden)


class State(TrainState):
    """What training changes: the running means and variances too, and which epoch it is."""

    batch_stats: Any = None
    epoch: int = 0


def images(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a batch of noise with one bright quarter, and which quarter that is."""
    numbers = np.random.default_rng(seed)
    quarter = numbers.integers(0, 4, BATCH)
    made = numbers.normal(3.0, 1.0, (BATCH, 8, 8, 1)).astype(np.float32)
    for image, where in zip(made, quarter, strict=True):
        row, column = divmod(int(where), 2)
        image[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 1.0
    return made, quarter.astype(np.int32)


def create(seed: int) -> State:
    """Makes a first state."""
    network = Network()
    variables = network.init(jax.random.key(seed), jnp.ones((1, 8, 8, 1)), train=False)
    return State.create(
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adam(3e-3),
        apply_fn=network.apply,
    )


def loss_of(state: State, params: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
    """Returns the loss, and beside it the new value of a field and one more metric."""
    pictures, labels = batch
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, updates = state.apply_fn(variables, pictures, train=True, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    right = (jnp.argmax(logits, axis=-1) == labels).mean()
    return loss, {"batch_stats": updates["batch_stats"], "accuracy": right}


def accuracy(state: State) -> float:
    """Returns the share of right answers on images that training never saw."""
    pictures, labels = images(seed=10**6)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    answers = np.argmax(state.apply_fn(variables, pictures, train=False), axis=-1)
    return float((answers == labels).mean())


def main() -> None:
    """Trains three epochs, saves each, and goes on from the second one."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/linen"
        train_step = TrainStep(loss_of)
        state = create(seed=0)
        for epoch in range(1, EPOCHS + 1):
            for _ in range(STEPS):
                state, metrics = train_step(state, images(int(state.step)))
            state = state.replace(epoch=epoch)
            save = state.save_state(run, verbose=False)
            shown = ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
            say(f"epoch {epoch}: step {int(state.step)}, {shown}")
        check("the step is compiled once", train_step.traces == 1, f"{train_step.traces} trace")
        check("it learns", accuracy(state) > 0.9, f"{accuracy(state):.0%} right, chance is 25%")

        save.wait()
        form = create(seed=1)  # says what goes where; its numbers are not used
        again = State.load_state(f"{run}/steps/{2 * STEPS}", form)
        check("the epoch comes back", again.epoch == 2, f"epoch {again.epoch}")
        moved = np.abs(np.asarray(again.batch_stats["BatchNorm_0"]["mean"])).max()
        check("so do the batch statistics", moved > 0.1, f"largest running mean {moved:.3f}")
        for _ in range(STEPS):
            again, _ = train_step(again, images(int(again.step)))
        again = again.replace(epoch=3)
        pairs = zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True)
        same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
        check("one more epoch ends where the first job ended, bit for bit", same, "every leaf")


if __name__ == "__main__":
    main()
