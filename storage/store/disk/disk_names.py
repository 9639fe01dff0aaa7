"""Has a local disk hold the names of folders, not only what lies in them.

A file that was synced survives a power failure only if the entry of each folder above it does. What
writes a file syncs the folder it lies in: TensorStore, for small objects, and `files_local`. A
folder that had to be made for it is an entry of the next one, which nobody has synced then.

Source: the calls of tensorstore 0.1.86 with `file_io_sync`, as strace shows them: fsync of the file
under its temporary name, rename, fsync of its folder; of a deletion, unlink and fsync of its
folder; nothing of the folders that it makes.
"""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

__all__ = ["forget_missing", "names_held", "sync_names", "sync_path"]

_held: Final[dict[str, tuple[int, int]]] = {}
"""Device and inode of folders whose names this process has had held, up to the root."""

_MOST_HELD: Final = 256
"""So many are remembered, those that were added last: a job makes folders for each step."""

_SYNCS_AT_ONCE: Final = 8
"""Of folders whose names nobody has had held."""


@contextlib.contextmanager
def names_held(folder: str) -> Iterator[None]:
    """Around a write into `folder`, which may make it: the names that lead there are held after it.

    Each folder is looked after once in a process, and again if it was removed since, or if many
    others were looked after.

    Args:
        folder: absolute path.

    Raises:
        OSError: the disk failed.
    """
    forget_missing(folder)
    yield
    with contextlib.suppress(FileNotFoundError):  # somebody removes it: no name is to be held
        _hold(folder)


def _hold(folder: str) -> None:
    new: dict[str, tuple[int, int]] = {}
    while (above := os.path.dirname(folder)) != folder:
        found = os.stat(folder)
        if _held.get(folder) == (found.st_dev, found.st_ino):
            break
        new[folder] = found.st_dev, found.st_ino
        folder = above
    synced = _all_synced([os.path.dirname(path) for path in new])
    ours = sum(itertools.takewhile(bool, synced))
    # Last: whoever finds a folder here relies on all that are above it.
    _held.update(itertools.islice(new.items(), ours))
    for known in list(_held)[:-_MOST_HELD]:
        _held.pop(known, None)


def _all_synced(folders: Sequence[str]) -> list[bool]:
    """`_is_synced` of each, at the same time: one by one, each would wait for the disk anew."""
    if len(folders) < 2:
        return [_is_synced(folder) for folder in folders]
    with ThreadPoolExecutor(min(len(folders), _SYNCS_AT_ONCE), "cairn-sync") as pool:
        return list(pool.map(_is_synced, folders))


def forget_missing(folder: str) -> None:
    """Regard the names of what is not there any more as not held: an inode may be used again.

    Args:
        folder: absolute path; it and those above it are looked at.
    """
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        below = os.path.join(folder, "")
        for known in [path for path in list(_held) if path == folder or path.startswith(below)]:
            _held.pop(known, None)
        folder = os.path.dirname(folder)


def sync_names(folder: str) -> None:
    """Have the disk hold all names in `folder`, and those that lead to it, whatever was done.

    Args:
        folder: absolute path.

    Raises:
        OSError: the disk failed.
    """
    sync_path(folder)
    while folder != (folder := os.path.dirname(folder)) and _is_synced(folder):
        pass


def sync_path(path: str) -> None:
    """Have the disk hold the bytes of a file, or the names in a folder.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:  # some file systems have no such call for folders
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def _is_synced(folder: str) -> bool:
    """Sync a folder; False if it is not ours to look into, and so not ours to have written to."""
    try:
        sync_path(folder)
    except PermissionError:
        return False
    return True
