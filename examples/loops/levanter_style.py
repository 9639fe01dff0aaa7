"""A loop that checkpoints as Levanter does: an Equinox state, handed to a checkpointer each step.

python -m examples.loops.levanter_style FOLDER UNTIL
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from examples.loops.array_checkpoints import Checkpointer, load_checkpoint

FEATURES, BATCH, PERIOD = 16, 8, 2
OPTIMIZER = optax.adamw(1e-2)


class TrainerState(eqx.Module):
    step: int
    model: eqx.nn.MLP
    opt_state: optax.OptState
    training_key: jax.Array


def create_state():
    model = eqx.nn.MLP(FEATURES, FEATURES, 32, 1, key=jax.random.key(0))
    return TrainerState(
        step=0,
        model=model,
        opt_state=OPTIMIZER.init(eqx.filter(model, eqx.is_array)),
        training_key=jax.random.PRNGKey(1),
    )


@eqx.filter_jit
def train_step(model, opt_state, key):
    batch = jax.random.normal(key, (BATCH, FEATURES))

    def loss_of(model):
        return jnp.mean((jax.vmap(model)(batch) - batch[:, ::-1]) ** 2)

    loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def train(folder, until):
    checkpointer = Checkpointer(folder, PERIOD)
    state = create_state()
    restored = load_checkpoint(state, folder)
    if restored is not None:
        state = restored
    while state.step < until:
        key, training_key = jax.random.split(state.training_key)
        model, opt_state, _ = train_step(state.model, state.opt_state, key)
        state = TrainerState(state.step + 1, model, opt_state, training_key)
        checkpointer.on_step(state.step, state)
    checkpointer.wait_until_finished()
    return state


if __name__ == "__main__":
    final = train(sys.argv[1], int(sys.argv[2]))
    leaves = jax.tree.leaves(eqx.filter(final.model, eqx.is_array))
    print(final.step, float(sum(jnp.sum(leaf) for leaf in leaves)))
