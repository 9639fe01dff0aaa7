"""Program that reads a step by plain Orbax, of whichever release runs it, and prints what it read.

It imports nothing of Cairn's: `python orbax_reader.py STEP_FOLDER ITEM...`.
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1


def traits(leaf):
    """Return dtype, shape, bits and place of a leaf, as JSON."""
    places = sorted(device.id for device in leaf.devices()) if isinstance(leaf, jax.Array) else None
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        kind, leaf = str(leaf.dtype), jax.random.key_data(leaf)
    else:
        kind = str(np.asarray(leaf).dtype)
    array = np.asarray(leaf)
    return [kind, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest(), places]


def leaves(tree):
    """Return the traits of each leaf by its keys."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(key.key) for key in keys): traits(leaf) for keys, leaf in flat}


def read(folder, items):
    """Return the items, the JSON of the step, and what one item's arrays are on the host alone."""
    trees = {item: ocp.PyTreeCheckpointHandler().restore(folder / item) for item in items}
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), trees[items[0]])
    arguments = ocp.args.PyTreeRestore(restore_args=on_host)
    host = ocp.PyTreeCheckpointHandler().restore(folder / items[0], args=arguments)
    with ocp.CheckpointManager(folder.parent) as manager:
        composite = ocp.args.Composite(**{item: ocp.args.StandardRestore() for item in items})
        by_manager = manager.restore(int(folder.name), args=composite)
    by_v1 = v1.load_checkpointables(folder)
    return {
        "release": ocp.__version__,
        "handler": {item: leaves(tree) for item, tree in trees.items()},
        "manager": {item: leaves(by_manager[item]) for item in items},
        "v1": {item: leaves(by_v1[item]) for item in items},
        "host": leaves(host),
        "meta": by_v1["meta"],
    }


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]), sys.argv[2:])))
