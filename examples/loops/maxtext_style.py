"""A loop that checkpoints as MaxText does: a state restored by specs, and the place in its data.

The calls are those of MaxText/checkpointing.py and MaxText/train.py at commit 0137dd1.

    python -m examples.loops.maxtext_style FOLDER UNTIL
"""

import sys

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from etils import epath
from flax import linen as nn
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions

FEATURES, BATCH, PERIOD, EXAMPLES = 16, 8, 2, 1000


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(FEATURES)(nn.relu(nn.Dense(FEATURES)(x)))


def create_manager(folder, use_async=True):
    return CheckpointManager(
        epath.Path(folder),
        item_names=("items", "iter"),
        options=CheckpointManagerOptions(
            create=True, save_interval_steps=PERIOD, enable_async_checkpointing=use_async
        ),
    )


class Noise(grain.RandomMapTransform):
    """An example made of its number, with noise that its position decides."""

    def random_map(self, element, rng):
        return (np.full(FEATURES, element / EXAMPLES) + rng.normal(size=FEATURES)).astype("float32")


def create_data_iterator():
    sampler = grain.IndexSampler(
        EXAMPLES, shuffle=True, seed=0, num_epochs=1, shard_options=grain.NoSharding()
    )
    loader = grain.DataLoader(
        data_source=grain.RangeDataSource(0, EXAMPLES, 1),
        sampler=sampler,
        operations=[Noise(), grain.Batch(BATCH)],
        worker_count=0,
    )
    return iter(loader)


def create_state():
    module = Network()
    variables = module.init(jax.random.key(0), jnp.ones((1, FEATURES)))
    return train_state.TrainState.create(
        apply_fn=module.apply, params=variables["params"], tx=optax.adamw(1e-2)
    )


def shardings_of(state, mesh):
    """Kernels are split by columns; all else is on every device."""

    def spec(leaf):
        return PartitionSpec(None, "fsdp") if leaf.ndim == 2 else PartitionSpec()

    return jax.tree.map(lambda leaf: NamedSharding(mesh, spec(leaf)), state)


def load_state_if_possible(manager, data_iterator, abstract):
    latest_step = manager.latest_step()
    if latest_step is None:
        return None
    restore_args = jax.tree.map(
        lambda leaf: orbax.checkpoint.type_handlers.ArrayRestoreArgs(
            mesh=leaf.sharding.mesh, mesh_axes=leaf.sharding.spec
        ),
        abstract,
    )
    return manager.restore(
        latest_step,
        args=orbax.checkpoint.args.Composite(
            items=orbax.checkpoint.args.PyTreeRestore(item=abstract, restore_args=restore_args),
            iter=grain.PyGrainCheckpointRestore(data_iterator),
        ),
    )


def save_checkpoint(manager, step, state, data_iterator):
    return manager.save(
        step,
        args=orbax.checkpoint.args.Composite(
            items=orbax.checkpoint.args.PyTreeSave(item=state),
            iter=grain.PyGrainCheckpointSave(data_iterator),
        ),
    )


@jax.jit
def train_step(state, batch):
    def loss_of(params):
        return jnp.mean((state.apply_fn({"params": params}, batch) - batch[:, ::-1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(folder, until):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    abstract = jax.eval_shape(create_state)
    shardings = shardings_of(abstract, mesh)
    abstract = jax.tree.map(lambda leaf, at: leaf.update(sharding=at), abstract, shardings)
    manager = create_manager(folder)
    data_iterator = create_data_iterator()
    restored = load_state_if_possible(manager, data_iterator, abstract)
    if restored is None:
        state = jax.jit(create_state, out_shardings=shardings)()
    else:
        state, data_iterator = restored["items"], restored["iter"]
    for step in range(int(state.step), until):
        state, loss = train_step(state, next(data_iterator))
        if save_checkpoint(manager, step, state, data_iterator):
            print(f"saved step {step}, loss {float(loss):.4f}", file=sys.stderr)
        if manager.reached_preemption(step):
            manager.wait_until_finished()
            return state
    manager.wait_until_finished()
    manager.close()
    return state


if __name__ == "__main__":
    final = train(sys.argv[1], int(sys.argv[2]))
    print(int(final.step), float(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(final.params))))
