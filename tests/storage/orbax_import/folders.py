"""What is done to folders of plain Orbax, and what was in them."""

import hashlib
from pathlib import Path

import orbax.checkpoint as ocp

from tests.plain_orbax import TREE, Tree


def everything(folder: Path) -> dict[str, tuple[int, str]]:
    """Every name below a folder, with the time of its last change and its content's hash."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        content = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (path.stat().st_mtime_ns, content)
    return found


def steps_of_items(folder: Path, *names: str, tree: Tree = TREE, steps: tuple[int, ...] = (5,)):
    """Steps of several trees, all of them alike."""
    with ocp.CheckpointManager(folder) as made:
        for step in steps:
            items = {name: ocp.args.StandardSave(tree) for name in names}
            made.save(step, args=ocp.args.Composite(**items))
