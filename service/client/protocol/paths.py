"""Default address of a control plane, and the paths of its resources."""

from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote

from cairn.service.errors import DownloadError

DEFAULT_URL: Final = "http://127.0.0.1:8321"
DEFAULT_ROOT: Final = "default"


def segment(text: str) -> str:
    """Quote a text as one path segment, "." and ".." included, which would change the path."""
    return "%2E" * len(text) if text in (".", "..") else quote(text, safe="")


def run_path(root: str, run: str) -> str:
    """Return the path of a run."""
    return f"/v1/roots/{segment(root)}/runs/{segment(run)}"


def step_path(root: str, run: str, step: int) -> str:
    """Return the path of a checkpoint."""
    return f"{run_path(root, run)}/checkpoints/{step}"


def leaf_path(root: str, run: str, step: int, leaf: str) -> str:
    """Return the path of a leaf."""
    return f"{step_path(root, run, step)}/tensors/{segment(leaf)}"


def file_path(root: str, run: str, step: int, name: str) -> str:
    """Return the path of a file of a checkpoint."""
    return f"{step_path(root, run, step)}/files/{'/'.join(map(segment, name.split('/')))}"


def plain_parts(name: str) -> tuple[str, ...]:
    """Split a file's name into its folders and its own name; refuse a path traversal.

    Raises:
        DownloadError: The name would leave the target folder.
    """
    parts = PurePosixPath(name).parts
    if not parts or "/".join(parts) != name or ".." in parts or "\\" in name or "\0" in name:
        raise DownloadError(
            f"{name!r}: expected the name of a file in a folder, found another path. Whatever "
            "answers is no Cairn control plane: see CAIRN_URL."
        )
    return parts


def alias_path(root: str, run: str, alias: str) -> str:
    """Return the path of an alias."""
    return f"{run_path(root, run)}/aliases/{segment(alias)}"


def policy_path(root: str, kind: str, name: str) -> str:
    """Return the path of a policy."""
    return f"/v1/roots/{segment(root)}/policies/{segment(kind)}/{segment(name)}"
