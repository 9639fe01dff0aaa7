"""Atomic replacement and removal of files under TensorStore's lock, without following links.

TensorStore writes the file `name` as `name.__lock`, which it locks, and then renames it. If there
is a symbolic link at `name.__lock`, TensorStore follows it and overwrites the link's target. In a
folder that others can write, a server therefore uses this module instead. Imports no TensorStore.

Source: tensorstore 0.1.86, `internal/os/file_lock.cc`, and files written by it.
"""

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from typing import Final

from cairn.storage.errors import ConfinementError
from cairn.storage.store.deadlines import Progress
from cairn.storage.store.disk.directory_entries import fsync_path
from cairn.storage.store.disk.stale_locks import LOCK_SUFFIX, still_has_name

__all__ = ["LockedFile", "locked_file"]

_LOOK_SECONDS: Final = 0.002
_WHOLE: Final = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class LockedFile:
    """File whose TensorStore lock we hold."""

    def __init__(self, path: str, descriptor: int) -> None:
        """Wrap a path and its lock file.

        Args:
            path: path of the file, which need not exist.
            descriptor: descriptor of its lock file.
        """
        self.path = path
        self.descriptor = descriptor

    def write(self, value: bytes) -> None:
        """Write `value` to the lock file and fsync it."""
        os.ftruncate(self.descriptor, 0)
        done = 0
        while done < len(value):
            done += os.pwrite(self.descriptor, memoryview(value)[done:], done)
        os.fsync(self.descriptor)

    def replace(self) -> None:
        """Rename the lock file to the file's name and sync the folder."""
        os.replace(self.path + LOCK_SUFFIX, self.path)
        fsync_path(os.path.dirname(self.path))

    def remove(self) -> None:
        """Remove the file, if there is one, and the lock file; one sync covers both."""
        with contextlib.suppress(FileNotFoundError):
            # The file first: once the lock file is gone, another writer may store a new file.
            os.unlink(self.path)
            os.unlink(self.path + LOCK_SUFFIX)
            fsync_path(os.path.dirname(self.path))


@contextlib.contextmanager
def locked_file(path: str) -> Iterator[LockedFile]:
    """Hold the lock of the file at a path within the context, and yield the locked file.

    Raises:
        TimeoutError: other processes held the lock for too long.
        ConfinementError: there is a symbolic link in place of the lock file.
        OSError: the disk failed.
    """
    name, progress = path + LOCK_SUFFIX, Progress()
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, 0o666)
        except OSError as exc:
            if exc.errno != errno.ELOOP:
                raise
            raise ConfinementError(
                "leads elsewhere",
                path=name,
                expected="a file",
                found="a symbolic link",
                next_step="Remove it.",
            ) from exc
        try:
            while not _try_lock(descriptor):
                if progress.seconds_left() <= 0:
                    raise TimeoutError(f"{name}: its lock is held")
                time.sleep(_LOOK_SECONDS)
            if not still_has_name(descriptor, name):
                continue  # its last holder renamed it, so it is no lock file any more
            try:
                yield LockedFile(path, descriptor)
            finally:
                if still_has_name(descriptor, name):
                    os.unlink(name)
            return
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock an open file unless somebody holds its lock; return True if this call locked it.

    The lock (of the open file description) also excludes other threads of this process.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE)
    except OSError as exc:
        if exc.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
