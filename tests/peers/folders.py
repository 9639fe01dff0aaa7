"""Program that imports the folders that Orbax's tests leave: `FOLDER SECONDS` are its arguments.

Each checkpoint is imported as a run of its own, and what the manager restores from that is compared
with what Orbax's own handlers restore. The figures are one line of JSON.
"""

import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

import cairn
from cairn import StorageError

_STEP, _TREE, _JSON = "_CHECKPOINT_METADATA", "_METADATA", "metadata"
_TEMPORARY = ".orbax-checkpoint-tmp"


class Checkpoint(NamedTuple):
    """A folder to import, and what Orbax reads in it by item; None is an item without a name."""

    folder: Path
    trees: dict[str | None, Any]
    json: dict[str | None, Any]
    custom_metadata: Any
    described: dict[str | None, Any]
    """Custom metadata of trees."""


def checkpoints(root: Path) -> Iterator[Path]:
    """Return the folders that hold a step, or a tree without a step around it."""
    inside: list[Path] = []
    for path in sorted({found.parent for name in (_STEP, _TREE) for found in root.rglob(name)}):
        if _TEMPORARY in str(path) or any(path.is_relative_to(outer) for outer in inside):
            continue
        inside.append(path)
        yield path


def read_by_orbax(folder: Path) -> Checkpoint:
    """Read a checkpoint; an item that Orbax itself fails to read is left out."""
    trees: dict[str | None, Any] = {}
    texts: dict[str | None, Any] = {}
    described: dict[str | None, Any] = {}
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    for path in (folder, *(path for path in inside if _TEMPORARY not in path.name)):
        name = None if path == folder else path.name
        if (path / _TREE).is_file():
            try:
                trees[name] = ocp.PyTreeCheckpointHandler().restore(path)
                described[name] = ocp.PyTreeCheckpointHandler().metadata(path).custom_metadata
            except Exception as error:
                trees[name] = error
        elif path != folder and (path / _JSON).is_file():  # beside it: what is kept of a root
            try:
                texts[name] = json.loads((path / _JSON).read_text())
            except ValueError as error:
                texts[name] = error
    custom = {}
    if (folder / _STEP).is_file():
        custom = json.loads((folder / _STEP).read_text()).get("custom_metadata") or {}
    return Checkpoint(folder, trees, texts, custom, described)


def compare(checkpoint: Checkpoint, run: Path) -> str:
    """Import a checkpoint; return "alike", or how it differs."""
    report = cairn.adopt(checkpoint.folder, run, step=0)
    if report.problems:
        return f"refused: {report.problems[0].partition(': ')[2]}"
    with cairn.CheckpointManager(run) as manager:
        kinds = ocp.args.Composite()
        restored = manager.restore(0, args=kinds)
        metadata = manager.metadata(0)
    if isinstance(restored, ocp.args.Composite):
        items = dict(restored.items())
    else:
        items = {"state": restored}
    if metadata.custom_metadata != checkpoint.custom_metadata:
        return f"custom metadata: {metadata.custom_metadata} for {checkpoint.custom_metadata}"
    for name, expected in {**checkpoint.trees, **checkpoint.json}.items():
        unnamed = items.get("state", items.get("default"))
        if (difference := differ(expected, items.get(name, unnamed))) is not None:
            return f"values: {name or 'the item'}: {difference}"
    described = metadata.item_metadata
    for name, expected in checkpoint.described.items():
        ours = described
        if isinstance(described, ocp.args.Composite):
            by_name = dict(described.items())
            ours = by_name.get(name, by_name.get("state"))
        if getattr(ours, "custom_metadata", None) != expected:
            return f"custom metadata of {name or 'the item'}: expected {expected}"
    return "alike"


def differ(expected: Any, restored: Any) -> str | None:
    """Return how two trees differ in structure, types, dtypes or bits; None if they do not."""
    structures = [jax.tree.structure(tree) for tree in (expected, restored)]
    if structures[0] != structures[1]:
        return f"structure {structures[1]}, expected {structures[0]}"[:400]
    for (path, first), second in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(restored), strict=True
    ):
        traits = [_traits(leaf) for leaf in (first, second)]
        if traits[0] != traits[1]:
            texts = [str(part[:-1])[:150] for part in traits]
            return f"{jax.tree_util.keystr(path)}: {texts[1]}, expected {texts[0]}"
    return None


def _traits(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.Array):
        kind: Any = jax.Array
        dtype, where = str(leaf.dtype), leaf.sharding
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return kind, dtype, leaf.shape, where, np.asarray(leaf).tobytes()
    if isinstance(leaf, np.ndarray):
        return np.ndarray, str(leaf.dtype), leaf.shape, leaf.tobytes()
    return type(leaf), leaf


def main(root: Path, seconds: float) -> None:
    """Print the figures."""
    counts = Counter[str]()
    different = []
    end = time.monotonic() + seconds
    for folder in checkpoints(root):
        if time.monotonic() > end:
            counts["not looked at"] += 1
            continue
        checkpoint = read_by_orbax(folder)
        unread = [
            item
            for item in (*checkpoint.trees.values(), *checkpoint.json.values())
            if isinstance(item, Exception)
        ]
        if unread or not (checkpoint.trees or checkpoint.json):
            counts["no item that Orbax reads"] += 1
            continue
        with tempfile.TemporaryDirectory() as temporary:
            try:
                outcome = compare(checkpoint, Path(temporary) / "run")
            except StorageError as error:
                outcome = f"refused: {error}"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
        if outcome == "alike":
            counts["alike"] += 1
        else:
            different.append(f"{folder.relative_to(root)}: {outcome}")
    print(json.dumps({"counts": counts, "different": different}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", True)
    main(Path(sys.argv[1]), float(sys.argv[2]))
