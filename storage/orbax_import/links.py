"""Symbolic links in a folder to import; links out of the folder are never followed."""

import os
from collections.abc import Iterator

from cairn.storage.errors import UnsupportedFormatError
from cairn.storage.store.uri import StoreURI

__all__ = ["links_in", "refuse_links"]

_NAMED_IN_ERRORS = 5


def links_in(folder: StoreURI) -> dict[str, str]:
    """Return the symbolic links directly in a folder: name -> target; {} for a bucket."""
    if folder.scheme != "file":
        return {}
    with os.scandir(folder.local_path) as entries:
        return {entry.name: os.readlink(entry.path) for entry in entries if entry.is_symlink()}


def refuse_links(step: StoreURI) -> None:
    """Raise UnsupportedFormatError if a checkpoint has links that can't be imported.

    Links to files inside the checkpoint are allowed; they are read, and copied by a fork, as files.

    Raises:
        UnsupportedFormatError: the checkpoint has links to folders, to targets outside of it, or to
            missing targets.
    """
    if step.scheme != "file":
        return
    amiss = sorted(_links_elsewhere(os.path.realpath(step.local_path)))
    if amiss:
        more = ", …" if len(amiss) > _NAMED_IN_ERRORS else ""
        raise UnsupportedFormatError(
            "a checkpoint with links",
            path=step,
            expected="files and folders, all of them its own",
            found=f"{', '.join(amiss[:_NAMED_IN_ERRORS])}{more}",
            next_step="Copy it with what the links lead to (cp -rL), and adopt the copy.",
        )


def _links_elsewhere(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                continue
            inside = os.path.commonpath((root, os.path.realpath(path))) == root
            if not inside or not os.path.isfile(path):
                yield f"{os.path.relpath(path, root)} -> {os.readlink(path)}"
