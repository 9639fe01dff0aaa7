"""Where a control plane is, and the paths of what it has."""

from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote

from cairn.service.errors import DownloadError

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


def file_path(root: str, run: str, step: int, name: str) -> str:
    """The path of a file of a checkpoint."""
    return f"{step_path(root, run, step)}/files/{'/'.join(map(segment, name.split('/')))}"


def plain_parts(name: str) -> tuple[str, ...]:
    """The folders that the name of a file has, and its own name: none leads out of where it goes.

    Raises:
        DownloadError: One would.
    """
    parts = PurePosixPath(name).parts
    if not parts or "/".join(parts) != name or ".." in parts or "\\" in name or "\0" in name:
        raise DownloadError(
            f"{name!r}: expected the name of a file in a folder, found another path. Whatever "
            "answers is no Cairn control plane: see CAIRN_URL."
        )
    return parts


def alias_path(root: str, run: str, alias: str) -> str:
    """The path of an alias."""
    return f"{run_path(root, run)}/aliases/{segment(alias)}"
