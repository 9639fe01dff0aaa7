"""Check of what runs require of a file system: create, rename, link, lock and sync.

One process on one host makes all calls. Problems between hosts show in the mount's options only.
"""

import errno
import fcntl
import os
import struct
import sys
from collections.abc import Callable
from typing import Final

from cairn.storage.store.disk.directory_entries import fsync_path
from cairn.storage.store_checks.mounts import Mount

__all__ = ["disk_problems"]

_NOT_OFFERED: Final = {
    *(errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOLCK),
}


def disk_problems(folder: str, mount: Mount | None) -> list[str]:
    """Return the problems of a file system, one line each.

    Args:
        folder: an empty folder that only this check uses.
        mount: mount of the folder; None if unknown.

    Raises:
        OSError: the disk failed, or has no room.
    """
    problems = [problem for check in _CHECKS if (problem := check(folder))]
    links = _hard_links(folder, mount)
    if links:
        problems.append(links)
    fsync_path(folder)
    return problems


def _exclusive_creation(folder: str) -> str:
    path = os.path.join(folder, "exclusive")
    _create(path)
    try:
        _create(path)
    except FileExistsError:
        return ""
    return "creating a file that exists: expected a refusal, found it done"


def _create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))


def _renames(folder: str) -> str:
    before, after = os.path.join(folder, "before"), os.path.join(folder, "after")
    _write(after, b"old")
    _write(before, b"new")
    os.replace(before, after)
    content = _read(after)
    if content != b"new":
        return f"renaming a file onto another: expected the new bytes there, found {content!r}"
    if os.path.lexists(before):
        return "renaming a file: expected its old name gone, found it"
    return ""


def _hard_links(folder: str, mount: Mount | None) -> str:
    """Return the problem with hard links, or "".

    A file system without hard links is no problem, as files are then copied.
    """
    file, link = os.path.join(folder, "file"), os.path.join(folder, "link")
    _write(file, b"kept")
    try:
        os.link(file, link)
    except OSError as exc:
        if exc.errno not in _NOT_OFFERED:
            raise
        if mount is not None and mount.is_in_user_space:
            return (
                f"a hard link on {mount.point} ({mount.kind}): expected it made, found "
                f"{exc.strerror}: a mounted bucket has none, nor renames that are atomic; for one "
                "of Google Cloud Storage give gs://BUCKET/…"
            )
        return ""
    try:
        os.link(file, link)
    except FileExistsError:
        pass
    else:
        return "a hard link to a name that exists: expected a refusal, found it done"
    _write(os.path.join(folder, "other"), b"other")
    os.replace(os.path.join(folder, "other"), file)
    content = _read(link)
    if content != b"kept":
        return f"a hard link whose other name was replaced: expected b'kept', found {content!r}"
    return ""


def _locks(folder: str) -> str:
    path = os.path.join(folder, "locked")
    holder, other = (os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for _ in range(2))
    try:
        try:
            _lock(holder)
        except OSError as exc:
            if exc.errno not in _NOT_OFFERED:
                raise
            return f"locking a file: expected it done, found {exc.strerror}; mount it with locks"
        try:
            _lock(other)
        except (BlockingIOError, PermissionError):
            return ""
        return "locking a file that is locked: expected a refusal, found it done"
    finally:
        os.close(holder)
        os.close(other)


def _lock(descriptor: int) -> None:
    """Lock a file as TensorStore does: where possible for the open file, not for the process."""
    if sys.platform == "linux":
        whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole_file)
            return
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # EINVAL: a kernel without open-file-description locks
                raise
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


_CHECKS: Final[tuple[Callable[[str], str], ...]] = (_exclusive_creation, _renames, _locks)
