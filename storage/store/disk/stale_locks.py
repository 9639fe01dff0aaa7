"""Removal of TensorStore lock files that killed writers left.

TensorStore writes the file `name` as `name.__lock`, which it locks, and then renames it. A writer
that is killed in between leaves the lock file. The next writer reuses it without truncating it: if
the old value was longer, its tail becomes the tail of the new value. Imports no TensorStore.

Source: tensorstore 0.1.86, `internal/os/file_lock.cc`, and files written by it.
"""

import contextlib
import fcntl
import os
import threading
from typing import Final

__all__ = ["LOCK_SUFFIX", "remove_stale_lock", "still_has_name"]

LOCK_SUFFIX: Final = ".__lock"

_one_at_a_time = threading.Lock()
"""Lock between threads, which `lockf` does not exclude; a fork waits for it too."""

os.register_at_fork(
    before=_one_at_a_time.acquire,
    after_in_parent=_one_at_a_time.release,
    after_in_child=_one_at_a_time.release,
)


def remove_stale_lock(path: str) -> None:
    """Remove the lock file of the file `path`, if no living process holds it.

    Raises:
        OSError: the folder can't be written.
    """
    name = path + LOCK_SUFFIX
    with _one_at_a_time:
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            # The lock first: only its holder may trust that the name still means this file.
            if _is_locked_by_us(descriptor) and still_has_name(descriptor, name):
                os.unlink(name)
        finally:
            os.close(descriptor)


def _is_locked_by_us(descriptor: int) -> bool:
    """Return True if this call got both kinds of lock; TensorStore uses one or the other."""
    with contextlib.suppress(OSError):  # a living writer holds it, or there are no locks here
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def still_has_name(descriptor: int, name: str) -> bool:
    """Return True if an open lock file still has its name: its writer may have renamed it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(name))
    return False
