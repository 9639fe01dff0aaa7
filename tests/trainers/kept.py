"""Trees that other trainers' own code stored, with their tokens and logits, kept for `make test`.

Each file of `kept/` has the arrays of one tiny model by their paths, what its trainer computed, and
the settings that it was made with. `python -m tests.trainers PYTHON --keep` writes them anew.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from cairn import CheckpointReader, Run
from cairn.interop.trainers.maxtext_settings import flat_yaml
from cairn.interop.weights.export import mapped_model
from cairn.state.checkpointing.trees import nest

FOLDER = Path(__file__).parent / "kept"
KEPT = (
    "maxtext-gemma2-scanned",
    "maxtext-gemma3-scanned",
    "maxtext-llama3.1-scanned",
    "maxtext-mixtral-scanned",
    "tunix-gemma3",
)


def keep(folder: Path, name: str) -> None:
    """Keep the model's part of the tree in a folder that a program left and that was adopted."""
    run = Run.open(str(folder / "run"))
    manifest = run.manifest(run.latest())
    settings = folder / "config.yml"
    told: dict[str, Any] = (
        flat_yaml(settings.read_text())
        if settings.is_file()
        else json.loads((folder / "config.json").read_text())
    )
    mapped = mapped_model(manifest, told)
    assert mapped is not None
    tree = mapped.tree
    reader = CheckpointReader.open(run.step_uri(run.latest()), manifest)
    arrays = {
        f"leaf:{tree.item}/{tree.root}{path}": reader.read(tree.item, f"{tree.root}{path}")
        for path in tree.shapes
    }
    reference = np.load(folder / "reference.npz")
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        told=np.frombuffer(json.dumps(told, sort_keys=True).encode(), np.uint8),
        **{key: reference[key] for key in ("tokens", "logits")},
        **arrays,
    )


def kept(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of a kept tree by "item/path", and its settings."""
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = {
            key.removeprefix("leaf:"): file[key] for key in file.files if key.startswith("leaf:")
        }
        return arrays, json.loads(file["told"].tobytes())


def reference(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a kept tree's tokens, and the logits that its trainer computed."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return file["tokens"].astype(np.int64), file["logits"]


def store(name: str, folder: Path, **others: Any) -> None:
    """Store a kept tree with plain Orbax, as step 1 of a folder, beside other items."""
    arrays, _ = kept(name)
    items: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        item, _, path = key.partition("/")
        items.setdefault(item, {})[path] = array
    with ocp.CheckpointManager(folder, item_names=(*items, *others)) as manager:
        saved = {item: ocp.args.StandardSave(nest(leaves)) for item, leaves in items.items()}
        saved |= {item: ocp.args.StandardSave(tree) for item, tree in others.items()}
        manager.save(1, args=ocp.args.Composite(**saved))
