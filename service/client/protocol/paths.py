"""Where a control plane is, and the paths of what it has."""

from typing import Final
from urllib.parse import quote

DEFAULT_URL: Final = "http://127.0.0.1:8321"
DEFAULT_ROOT: Final = "default"


def segment(text: str) -> str:
    """One segment of a path, whatever the text is; "." and ".." would lead to another path."""
    return "%2E" * len(text) if text in (".", "..") else quote(text, safe="")


def run_path(root: str, run: str) -> str:
    """The path of a run."""
    return f"/v1/roots/{segment(root)}/runs/{segment(run)}"


def step_path(root: str, run: str, step: int) -> str:
    """The path of a checkpoint."""
    return f"{run_path(root, run)}/checkpoints/{step}"


def leaf_path(root: str, run: str, step: int, leaf: str) -> str:
    """The path of a leaf."""
    return f"{step_path(root, run, step)}/tensors/{segment(leaf)}"


def alias_path(root: str, run: str, alias: str) -> str:
    """The path of an alias."""
    return f"{run_path(root, run)}/aliases/{segment(alias)}"
