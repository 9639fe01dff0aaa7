"""A loop as Flax's checkpointing guide has it: an NNX model's state, through an Orbax manager.

python -m examples.loops.flax_tutorial FOLDER UNTIL
"""

import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

FEATURES, BATCH = 16, 8


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.norm = nnx.BatchNorm(FEATURES, rngs=rngs)
        self.second = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


@nnx.jit
def train_step(model, optimizer, batch):
    def loss_of(model):
        return jnp.mean((model(batch) - batch[:, ::-1]) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(folder, until):
    model = TwoLayers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
    with ocp.CheckpointManager(folder, options=options) as manager:
        start = 0
        if manager.latest_step() is not None:
            start = manager.latest_step() + 1
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state((model, optimizer)))
            found = manager.restore(start - 1, args=ocp.args.StandardRestore(abstract))
            nnx.update((model, optimizer), found)
        for step in range(start, until):
            batch = jax.random.normal(jax.random.key(step), (BATCH, FEATURES))
            train_step(model, optimizer, batch)
            manager.save(step, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
        manager.wait_until_finished()
    return model


if __name__ == "__main__":
    final = train(sys.argv[1], int(sys.argv[2]))
    parameters = jax.tree.leaves(nnx.state(final, nnx.Param))
    print(sys.argv[2], float(sum(jnp.sum(leaf) for leaf in parameters)))
