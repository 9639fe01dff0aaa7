"""Folders as plain Orbax lays them out, by its present and its older ways.

Each layout is a function of the folder, which is empty or not there.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from flax import serialization
from flax.training import checkpoints
from orbax.checkpoint import v1

Tree = dict[str, Any]

TREE: Final[Tree] = {"w": np.ones((4, 4), np.float32)}

MIXED: Final[Tree] = {
    "params": {
        "embed": np.arange(96, dtype=np.float32).reshape(12, 8),
        "half": (np.arange(10) / 7).astype(ml_dtypes.bfloat16),
        "layers": [np.arange(6, dtype=np.int8), np.full((2, 3), 0.5, np.float16)],
    },
    "mask": np.array([True, False, True]),
    "step": 7,
    "rate": 0.25,
    "scale": np.array(2.5, np.float32),
    "zeros": np.zeros((5, 3), np.float32),
    "nothing": None,
    "empty": {},
}
"""Shapes, dtypes and leaves of most kinds."""


def manager(folder: Path, tree: Tree = TREE, steps: tuple[int, ...] = (5, 10), **options: Any):
    """Its steps' folders are named by `options`."""
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**options)) as made:
        for step in steps:
            made.save(step, args=ocp.args.StandardSave(tree))


def manager_of_items(folder: Path, tree: Tree = TREE) -> None:
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(tree), data=ocp.args.JsonSave({"position": 1})
    )
    with ocp.CheckpointManager(folder) as made:
        made.save(5, args=items)


def manager_with_metrics(folder: Path, tree: Tree = TREE) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda found: found["loss"], best_mode="min")
    with ocp.CheckpointManager(folder, options=options) as made:
        for step, loss in ((5, 0.5), (10, 0.75)):
            made.save(step, args=ocp.args.StandardSave(tree), metrics={"loss": loss})


def training_checkpointer(folder: Path, tree: Tree = TREE) -> None:
    with v1.training.Checkpointer(folder) as made:
        made.save(5, tree)


def training_checkpointables(folder: Path, tree: Tree = TREE) -> None:
    with v1.training.Checkpointer(folder) as made:
        made.save_checkpointables(5, {"state": tree, "extra": {"a": 1}})


def tree_folders(folder: Path, tree: Tree = TREE) -> None:
    ocp.PyTreeCheckpointer().save(folder / "best", tree)


def tree_folders_of_small_files(folder: Path, tree: Tree = TREE) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(folder / "best", tree)


def tree_of_small_files_of_zarr3(folder: Path, tree: Tree = TREE) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    ocp.Checkpointer(handler).save(folder, tree)


def steps_of_zarr3(folder: Path, tree: Tree = TREE) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    for step in (1, 2):
        ocp.Checkpointer(handler).save(folder / str(step), tree)


def flax_checkpoints(folder: Path, tree: Tree = TREE) -> None:
    checkpoints.save_checkpoint(
        str(folder), tree, step=5, orbax_checkpointer=ocp.PyTreeCheckpointer()
    )


def one_tree(folder: Path, tree: Tree = TREE) -> None:
    ocp.PyTreeCheckpointer().save(folder, tree)


def one_step(folder: Path, tree: Tree = TREE) -> None:
    v1.save(folder, tree)


def one_standard_step(folder: Path, tree: Tree = TREE) -> None:
    with ocp.StandardCheckpointer() as made:
        made.save(folder, tree)


def undescribed_steps(folder: Path, tree: Tree = TREE) -> None:
    """As before Orbax described a whole step: only each item says what it is."""
    for step in (5, 10):
        ocp.PyTreeCheckpointer().save(folder / str(step) / "params", tree)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        for path in folder.rglob(name):
            path.unlink()


def of_an_older_release(folder: Path) -> None:
    """Without what older releases did not say of a tree, nor of a step."""
    for path in folder.rglob("_METADATA"):
        described = json.loads(path.read_text())
        for name in ("use_ocdbt", "custom_metadata", "store_array_data_equal_to_fill_value"):
            described.pop(name, None)
        path.write_text(json.dumps(described))
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "_sharding"):
        for path in folder.rglob(name):
            path.unlink()


def older_trees(folder: Path, tree: Tree = TREE) -> None:
    for step in (5, 10):
        ocp.PyTreeCheckpointer().save(folder / f"checkpoint_{step}", tree)
    of_an_older_release(folder)


def older_trees_of_small_files(folder: Path, tree: Tree = TREE) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    for step in (5, 10):
        ocp.Checkpointer(handler).save(folder / f"checkpoint_{step}", tree)
    of_an_older_release(folder)


def variables(folder: Path, tree: Tree = TREE) -> None:
    """As older Flax saved an `nnx.State`: a "value" below each Variable."""

    def opened(node: Any) -> Any:
        match node:
            case dict():
                return {name: opened(child) for name, child in node.items()}
            case list():
                return [opened(child) for child in node]
            case None:
                return None
            case _:
                return {"value": node}

    manager(folder, opened(tree), steps=(5,))


def older_items(folder: Path) -> None:
    """The names of `undescribed_steps`, without arrays."""
    for step in ("5", "10"):
        item = folder / step / "params"
        item.mkdir(parents=True)
        (item / "_METADATA").write_text("{}")


def oldest_items(folder: Path) -> None:
    """All leaves of an item in one file."""
    item = folder / "checkpoint_5" / "state"
    item.mkdir(parents=True)
    (item / "checkpoint").write_bytes(b"leaves")


def aggregated_steps(folder: Path) -> None:
    """Two leaves of three in one msgpack file, as `SaveArgs(aggregate=True)` had them kept."""
    tree = {"big": np.arange(6.0, dtype=np.float32), "small": np.ones(3, np.int32), "step": 7}
    manager(folder, tree, (5,))
    item = folder / "5" / "default"
    described = json.loads((item / "_METADATA").read_text())
    for entry in described["tree_metadata"].values():
        if entry["key_metadata"][0]["key"] != "big":
            entry["value_metadata"]["skip_deserialize"] = True
    (item / "_METADATA").write_text(json.dumps(described))
    kept = {**tree, "big": "PLACEHOLDER://big"}
    (item / "checkpoint").write_bytes(serialization.msgpack_serialize(kept))


def with_uncommitted(folder: Path, tree: Tree = TREE) -> None:
    """A step, and what a save leaves that was killed."""
    manager(folder, tree, steps=(5,))
    shutil.copytree(folder / "5", folder / "10.orbax-checkpoint-tmp-1700000000")


READABLE: Final[dict[str, Callable[..., Any]]] = {
    "steps": manager,
    "steps with a prefix": lambda folder, *tree: manager(folder, *tree, step_prefix="ckpt"),
    "steps of eight digits": lambda folder, *tree: manager(
        folder, *tree, step_format_fixed_length=8
    ),
    "steps of several items": manager_of_items,
    "steps with metrics": manager_with_metrics,
    "steps of the v1 checkpointer": training_checkpointer,
    "checkpointables of the v1 checkpointer": training_checkpointables,
    "steps of zarr 3 without items": steps_of_zarr3,
    "steps of flax.training": flax_checkpoints,
    "steps that nothing describes": undescribed_steps,
    "older trees": older_trees,
    "older trees of small files": older_trees_of_small_files,
    "steps beside one that is not committed": with_uncommitted,
    "Variables of older Flax": variables,
    "one tree": one_tree,
    "one tree of small files of zarr 3": tree_of_small_files_of_zarr3,
    "one step": one_step,
    "one standard step": one_standard_step,
}
"""Folders of which every checkpoint can be adopted, if it was committed."""

UNNUMBERED: Final[dict[str, Callable[..., Any]]] = {
    "folders of trees": tree_folders,
    "folders of trees in small files": tree_folders_of_small_files,
}
"""Folders of checkpoints without a number: each is adopted by itself."""

UNREADABLE: Final[dict[str, Callable[..., Any]]] = {
    "steps of an older release": older_items,
    "steps of the oldest releases": oldest_items,
}

LAYOUTS: Final = READABLE | UNNUMBERED | UNREADABLE


def commit_time(step: Path) -> int:
    """When Orbax says that it committed a step, in nanoseconds."""
    return int(json.loads((step / "_CHECKPOINT_METADATA").read_text())["commit_timestamp_nsecs"])
