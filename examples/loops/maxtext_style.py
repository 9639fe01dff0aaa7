"""A loop that checkpoints as MaxText does: a state restored by specs, and the place in its data.

The calls are those of src/maxtext/common/checkpointing.py and grain_utility.py at commit e591f30.

    python -m examples.loops.maxtext_style FOLDER UNTIL
"""

import dataclasses
import sys
from typing import Any

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
from orbax.checkpoint.checkpoint_managers import FixedIntervalPolicy, LatestN

ocp_args = orbax.checkpoint.args
FEATURES, BATCH, PERIOD, EXAMPLES = 16, 8, 2, 1000


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(FEATURES)(nn.relu(nn.Dense(FEATURES)(x)))


class GrainCheckpointHandler(grain.PyGrainCheckpointHandler, orbax.checkpoint.CheckpointHandler):
    """Saves the iterators of a process, each with its place among those of all."""

    def save(self, directory, item=None, args=None):
        for iterator, index, count in args.item:
            name = f"process_{index}-of-{count}.json"
            (directory / name).write_text(iterator.get_state().decode())

    def restore(self, directory, item=None, args=None):
        name = f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        args.item.set_state((directory / name).read_text().encode())
        return args.item


@ocp_args.register_with_handler(GrainCheckpointHandler, for_save=True)
@dataclasses.dataclass
class GrainCheckpointSave(ocp_args.CheckpointArgs):
    item: Any


@ocp_args.register_with_handler(GrainCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class GrainCheckpointRestore(ocp_args.CheckpointArgs):
    item: Any
    process_index: int | None = None
    process_count: int | None = None


def create_manager(folder, use_async=True):
    return CheckpointManager(
        epath.Path(folder),
        item_names=("items", "iter"),
        item_handlers={
            "items": orbax.checkpoint.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True),
            "iter": GrainCheckpointHandler(),
        },
        options=CheckpointManagerOptions(
            create=True,
            enable_async_checkpointing=use_async,
            save_decision_policy=FixedIntervalPolicy(interval=PERIOD),
            preservation_policy=LatestN(10),
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
    step = manager.latest_step()
    if step is None:
        return None
    restore_args = jax.tree.map(
        lambda leaf: orbax.checkpoint.type_handlers.ArrayRestoreArgs(sharding=leaf.sharding),
        abstract,
    )
    items = ocp_args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
    if (manager.directory / str(step) / "iter").exists():
        return restore_grain_iterator(manager, step, data_iterator, items)
    return manager.restore(step, args=ocp_args.Composite(items=items))


def restore_grain_iterator(manager, step, data_iterator, items):
    directory = manager.directory / str(step) / "iter"
    stored = len(list(directory.glob("process_*-of-*.json")))
    if stored != jax.process_count():
        raise ValueError(f"{directory}: saved by {stored} processes, now {jax.process_count()}")
    iterator = GrainCheckpointRestore(data_iterator)
    return manager.restore(step, args=ocp_args.Composite(items=items, iter=iterator))


def save_checkpoint(manager, step, state, data_iterator):
    chunks = jax.tree.map(lambda _: orbax.checkpoint.SaveArgs(chunk_byte_size=2**31), state)
    iterators = [(data_iterator, jax.process_index(), jax.process_count())]
    return manager.save(
        step,
        args=ocp_args.Composite(
            items=ocp_args.PyTreeSave(state, save_args=chunks, ocdbt_target_data_file_size=2**31),
            iter=GrainCheckpointSave(iterators),
        ),
        custom_metadata={"scan_layers": True},
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
        state = restored["items"]
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
