"""Durable directory entries on a local disk.

A synced file survives a power failure only if the directory entry of every folder above it does.
The writers of files, TensorStore and `files_local`, sync the folder of the file. If they had to
create that folder, its own entry, in the folder above, is not synced yet: this module does that.

Source: the calls of tensorstore 0.1.86 with `file_io_sync`, as strace shows them: fsync of the file
under its temporary name, rename, fsync of its folder; for a deletion, unlink and fsync of its
folder; no fsync for the folders that it creates.
"""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

__all__ = ["durable_entries", "forget_missing", "fsync_path", "sync_entries"]

_synced: Final[dict[str, tuple[int, int]]] = {}
"""Device and inode of folders whose entries this process has synced, up to the root."""

_MAX_SYNCED: Final = 256
"""Most entries of `_synced`, of which the newest are kept: a job creates folders for each step."""

_SYNCS_AT_ONCE: Final = 8
"""Concurrent fsyncs of folders that are not in `_synced`."""


@contextlib.contextmanager
def durable_entries(folder: str) -> Iterator[None]:
    """Sync, after a write into `folder` that may create it, the directory entries that lead to it.

    A process syncs each folder once, and again if it was removed since, or dropped from the cache.

    Args:
        folder: absolute path.

    Raises:
        OSError: the disk failed.
    """
    forget_missing(folder)
    yield
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile: nothing to sync
        _sync_new_entries(folder)


def _sync_new_entries(folder: str) -> None:
    new: dict[str, tuple[int, int]] = {}
    while (above := os.path.dirname(folder)) != folder:
        status = os.stat(folder)
        if _synced.get(folder) == (status.st_dev, status.st_ino):
            break
        new[folder] = status.st_dev, status.st_ino
        folder = above
    parents = [os.path.dirname(path) for path in new]
    if len(parents) < 2:
        synced = [_is_synced(parent) for parent in parents]
    else:  # concurrently, as each call waits for the disk
        with ThreadPoolExecutor(min(len(parents), _SYNCS_AT_ONCE), "cairn-sync") as pool:
            synced = list(pool.map(_is_synced, parents))
    count = sum(itertools.takewhile(bool, synced))
    # Only after the syncs: a folder in the cache implies that all entries above it are durable.
    _synced.update(itertools.islice(new.items(), count))
    for oldest in list(_synced)[:-_MAX_SYNCED]:
        _synced.pop(oldest, None)


def forget_missing(folder: str) -> None:
    """Forget the folders that no longer exist: a new folder may reuse the inode.

    Args:
        folder: absolute path; the function checks it and the folders above it.
    """
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        below = os.path.join(folder, "")
        for path in [path for path in list(_synced) if path == folder or path.startswith(below)]:
            _synced.pop(path, None)
        folder = os.path.dirname(folder)


def sync_entries(folder: str) -> None:
    """Sync the entries in `folder` and those that lead to it; the cache is ignored.

    Args:
        folder: absolute path.

    Raises:
        OSError: the disk failed.
    """
    fsync_path(folder)
    while folder != (folder := os.path.dirname(folder)) and _is_synced(folder):
        pass


def fsync_path(path: str) -> None:
    """Call fsync on a file or a folder; do nothing if the file system can't sync folders.

    Raises:
        OSError: the path can't be opened, or the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:  # some file systems can't fsync folders
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def _is_synced(folder: str) -> bool:
    """Sync a folder and return True; False if this process may not open it.

    It then can't have written to the folder either.
    """
    try:
        fsync_path(folder)
    except PermissionError:
        return False
    return True
