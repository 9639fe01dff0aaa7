"""Checkpoints with JAX's own array serialization, called as Levanter's are.

A step is a folder `step-N` with one array for each leaf and a `metadata.json`, which is written
last. The calls are those of src/levanter/checkpoint.py at commit 00ecb15.
"""

import json
from pathlib import Path

import equinox as eqx
import jax
from jax.experimental.array_serialization.serialization import (
    GlobalAsyncCheckpointManager,
    get_tensorstore_spec,
)


def is_stored(leaf):
    return eqx.is_array(leaf) or isinstance(leaf, bool | int | float | complex)


class Checkpointer:
    """Saves every `every` steps."""

    def __init__(self, base_path, every):
        self.base_path = Path(base_path)
        self.every = every
        self._manager = GlobalAsyncCheckpointManager(timeout_secs=60 * 30)

    def on_step(self, step, state):
        if step % self.every == 0:
            self.save_checkpoint(step, state)

    def save_checkpoint(self, step, state):
        folder = self.base_path / f"step-{step}"
        leaves = [jax.numpy.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(state, is_stored))]
        places = [get_tensorstore_spec(str(folder / str(n))) for n, _ in enumerate(leaves)]

        def committed():
            (folder / "metadata.json").write_text(json.dumps({"step": step}))

        self._manager.serialize(leaves, places, on_commit_callback=committed)

    def wait_until_finished(self):
        self._manager.wait_until_finished()


def load_checkpoint(state, base_path):
    """The latest complete step, in the containers of `state`; None if there is none."""
    done = [path.parent for path in Path(base_path).glob("step-*/metadata.json")]
    if not done:
        return None
    folder = max(done, key=lambda path: int(path.name.removeprefix("step-")))
    stored, rest = eqx.partition(state, is_stored)
    leaves, structure = jax.tree.flatten(stored)
    places = [get_tensorstore_spec(str(folder / str(n))) for n, _ in enumerate(leaves)]
    shardings = [jax.numpy.asarray(leaf).sharding for leaf in leaves]
    arrays = GlobalAsyncCheckpointManager().deserialize(shardings, places)
    found = [
        array if eqx.is_array(leaf) else type(leaf)(array)
        for array, leaf in zip(arrays, leaves, strict=True)
    ]
    return eqx.combine(jax.tree.unflatten(structure, found), rest)
