"""Files on a local disk."""

import builtins
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import BinaryIO, Final

from typing_extensions import override

from cairn.storage.errors import ConfinementError, InvalidURIError, NotFoundError
from cairn.storage.store.disk.confinement import (
    PathHandle,
    check_below,
    open_below,
    open_folder_handle,
)
from cairn.storage.store.disk.direct_writes import DirectWrites
from cairn.storage.store.disk.directory_entries import durable_entries, forget_missing, fsync_path
from cairn.storage.store.disk.stale_locks import LOCK_SUFFIX, remove_stale_lock
from cairn.storage.store.files import (
    FileEntry,
    Files,
    FileStat,
    FileUsage,
    FileWriter,
    translated_errors,
)
from cairn.storage.store.uri import StoreURI, check_path

__all__ = ["SETTLED_NANOSECONDS", "TEMPORARY_PREFIX", "LocalFiles"]

logger = logging.getLogger(__name__)

SETTLED_NANOSECONDS: Final = 2_500_000_000
"""Age in nanoseconds from which a timestamp identifies a version.

Two changes within one clock tick have the same timestamp, and the coarsest clock in use (FAT) ticks
every two seconds.
"""

TEMPORARY_PREFIX = ".cairn-tmp-"
"""Prefix of files that are being written; listings hide them."""


class LocalFiles(Files):
    """`Files` of a folder on this machine.

    Does not follow symbolic links out of the folder, nor out of its confinement.
    """

    @override
    def stat(self, rel: str) -> FileStat:
        with translated_errors(self.uri / rel, "stat"), self._handle(rel) as handle:
            status = os.stat(handle.path)
            if stat.S_ISDIR(status.st_mode):
                raise NotFoundError(path=self.uri / rel, expected="a file", found="a folder")
            return FileStat(status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")

    @override
    def list(self, rel: str = "") -> builtins.list[FileEntry]:
        with translated_errors(self._at(rel), "list"):
            try:
                with self._handle(rel) as folder, os.scandir(folder.path) as items:
                    shown = [item for item in items if self._is_shown(item)]
                    entries = [entry for item in shown if (entry := _entry(item)) is not None]
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(entries)

    def etags(self, rel: str = "") -> dict[str, str | None]:
        """Return name -> stamp of each file in a folder; a stamp changes whenever the file does.

        No file is read. The stamp is None if the file changed too recently for a reliable
        timestamp.
        """
        newest = time.time_ns() - SETTLED_NANOSECONDS
        etags: dict[str, str | None] = {}
        with translated_errors(self._at(rel), "list"):
            try:
                with self._handle(rel) as folder, os.scandir(folder.path) as items:
                    for item in items:
                        if self._is_shown(item) and (etag := _etag(item, newest)):
                            etags[item.name] = etag[0]
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return etags

    @override
    def walk(self, rel: str = "") -> builtins.list[FileEntry]:
        with translated_errors(self._at(rel), "list"):
            return sorted(self._files_below(self._checked_folder(rel), PurePosixPath()))

    @override
    def free_bytes(self) -> int | None:
        folder = self.uri.local_path
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        with translated_errors(self.uri):
            status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    @override
    def usage(self, rel: str = "") -> builtins.list[FileUsage]:
        folder = self._folder(rel)
        files = []
        with translated_errors(folder, "list"):
            for place, _, names in os.walk(folder):
                for name in names:
                    path = os.path.join(place, name)
                    try:
                        status = os.lstat(path)
                    except FileNotFoundError:  # removed since it was listed
                        continue
                    shared = (status.st_dev, status.st_ino)
                    files.append(FileUsage(os.path.relpath(path, folder), status.st_size, shared))
        return sorted(files)

    def _files_below(self, rel: str, prefix: PurePosixPath) -> Iterator[FileEntry]:
        entries, folders = [], []
        try:
            with self._handle(rel) as folder, os.scandir(folder.path) as items:
                for item in items:
                    if not self._is_shown(item):
                        continue
                    if item.is_dir(follow_symlinks=False):
                        folders.append(item.name)
                    elif item.is_file():
                        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                            status, name = item.stat(), str(prefix / item.name)
                            modified = status.st_mtime_ns
                            entries.append(
                                FileEntry(name, status.st_size, False, modified_ns=modified)
                            )
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from entries
        for name in folders:  # with no folder open: any depth takes one descriptor
            yield from self._files_below(f"{rel}/{name}".removeprefix("/"), prefix / name)

    @override
    def open_read(self, rel: str) -> BinaryIO:
        with translated_errors(self.uri / rel, "read"):
            return open(self._opened(rel), "rb")

    @override
    def read_range(self, rel: str, start: int, end: int) -> bytes:
        with translated_errors(self.uri / rel, "read"), open(self._opened(rel), "rb") as stream:
            stream.seek(start)
            return stream.read(max(0, end - start))

    @override
    def read_into(self, rel: str, start: int, buffer: memoryview) -> int:
        done = 0
        with (
            translated_errors(self.uri / rel, "read"),
            open(self._opened(rel), "rb", buffering=0) as stream,
        ):
            while count := os.preadv(stream.fileno(), [buffer[done:]], start + done):
                done += count
        return done

    @override
    def open_write(self, rel: str, *, read_back: bool = False) -> FileWriter:
        with translated_errors(self.uri / rel):
            return _LocalWriter(self.uri, self._path(rel), self.uri / rel, read_back=read_back)

    @override
    def delete_tree(self, rel: str) -> None:
        path = self._path(rel)
        with translated_errors(path, "delete"):
            try:
                with open_folder_handle(self.uri, os.path.dirname(path)) as folder:
                    name = os.path.join(folder.path, os.path.basename(path))
                    if os.path.isdir(name) and not os.path.islink(name):
                        shutil.rmtree(name)
                    else:
                        os.unlink(name)
                    fsync_path(folder.path)
            except FileNotFoundError:
                return
            finally:
                forget_missing(path)

    @override
    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with translated_errors(self.uri):
            descriptor = _locked_folder(self._folder(""))
        try:
            yield
        finally:
            os.close(descriptor)

    @override
    def sweep(self, rel: str) -> None:
        folders = []
        with translated_errors(self._at(rel)):
            try:
                with self._handle(rel) as folder, os.scandir(folder.path) as items:
                    for item in items:
                        if item.name.startswith(TEMPORARY_PREFIX):
                            _sweep(item)
                        elif item.name.endswith(LOCK_SUFFIX):
                            remove_stale_lock(item.path.removesuffix(LOCK_SUFFIX))
                        elif item.is_dir(follow_symlinks=False):
                            folders.append(item.name)
            except (FileNotFoundError, NotADirectoryError):
                return
        for name in folders:  # with no folder open: any depth takes one descriptor
            self.sweep(f"{rel}/{name}".removeprefix("/"))

    @override
    def _copy_within(self, source: str, target: Files, target_rel: str, etag: str | None) -> bool:
        if not isinstance(target, LocalFiles) or etag is not None:
            return False
        with (
            open(self._opened(source), "rb") as stream,
            _LocalWriter(target.uri, target._path(target_rel), target.uri / target_rel) as sink,
        ):
            sink.copy_from(stream.fileno(), os.fstat(stream.fileno()).st_size)
        return True

    @override
    def _move_within(self, source: str, target: Files, target_rel: str) -> bool:
        if not isinstance(target, LocalFiles):
            return False
        path, new = self._path(source), target._path(target_rel)
        with translated_errors(self.uri / source):
            os.stat(path)  # fails before a folder is created for it
            forget_missing(os.path.dirname(new))
            try:
                with (
                    open_folder_handle(self.uri, os.path.dirname(path)) as here,
                    open_folder_handle(target.uri, os.path.dirname(new), create=True) as there,
                ):
                    os.replace(
                        os.path.join(here.path, os.path.basename(path)),
                        os.path.join(there.path, os.path.basename(new)),
                    )
            except OSError as exc:
                if exc.errno != errno.EXDEV:  # the folders are on two disks
                    raise
                return False
            with durable_entries(os.path.dirname(new)):
                fsync_path(os.path.dirname(new))
            with contextlib.suppress(FileNotFoundError):
                fsync_path(os.path.dirname(path))
        return True

    def _path(self, rel: str) -> str:
        path = os.path.join(self.uri.local_path, *check_path(rel, within=self.uri).split("/"))
        check_below(self.uri, path)
        return path

    def _folder(self, rel: str) -> str:
        path = self._at(rel).local_path
        check_below(self.uri, path)
        return path

    def _at(self, rel: str) -> StoreURI:
        checked = self._checked_folder(rel)
        return self.uri / checked if checked else self.uri

    def _handle(self, rel: str) -> PathHandle:
        return PathHandle(self.uri, self._at(rel).local_path)

    def _opened(self, rel: str) -> int:
        if self.uri.confinement is None:
            self._path(rel)
        return open_below(self.uri, rel)

    def _is_shown(self, item: os.DirEntry[str]) -> bool:
        if item.name.startswith(TEMPORARY_PREFIX):
            return False
        if not item.is_symlink():
            return True
        with contextlib.suppress(ConfinementError):
            check_below(self.uri, item.path)
            return os.path.exists(item.path)
        return False


def _sweep(item: os.DirEntry[str]) -> None:
    """Remove a temporary file unless its writer is alive."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(item.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if _locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                os.unlink(item.path)
        finally:
            os.close(descriptor)


def _etag(item: os.DirEntry[str], newest: int) -> tuple[str | None] | None:
    """Return the stamp of a file; None if it is a folder, or no longer exists."""
    try:
        if item.is_dir():
            return None
        status = item.stat()
    except FileNotFoundError:
        return None
    changed = status.st_ctime_ns  # a replacement can have any mtime, but has a new ctime
    etag = f"{changed:x}-{status.st_ino:x}-{status.st_size:x}"
    return (None,) if changed > newest else (etag,)


def _entry(item: os.DirEntry[str]) -> FileEntry | None:
    """Return the listing entry of a name; None if it no longer exists."""
    try:
        is_dir = item.is_dir()
        return FileEntry(item.name, 0 if is_dir else item.stat().st_size, is_dir)
    except FileNotFoundError:
        return None


def _locked_folder(folder: str) -> int:
    """Lock a folder, created if needed, where locks exist; return its descriptor."""
    while True:
        forget_missing(folder)
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not _locked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                logger.warning("%s: waiting, if another writes this folder", folder)
                _locked(descriptor, fcntl.LOCK_EX)
            locked = os.fstat(descriptor)
            with contextlib.suppress(FileNotFoundError):
                now = os.stat(folder)
                if (now.st_dev, now.st_ino) == (locked.st_dev, locked.st_ino):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed or replaced while we waited: lock the new one


def _locked(descriptor: int, how: int) -> bool:
    """Try to lock a file until it is closed or the process ends; return True on success."""
    with contextlib.suppress(OSError):  # its writer is alive, or there are no locks here
        fcntl.flock(descriptor, how)
        return True
    return False


class _LocalWriter(FileWriter):
    """Writer of a hidden, locked temporary file beside the target: fsync, then rename."""

    def __init__(self, uri: StoreURI, path: str, shown: object, *, read_back: bool = False) -> None:
        self._uri = uri
        self._path = path
        self._shown = shown
        folder = os.path.dirname(path)
        forget_missing(folder)
        try:
            handle = open_folder_handle(uri, folder, create=True)
        except (FileExistsError, NotADirectoryError) as exc:
            raise InvalidURIError(
                "a file is in the way",
                path=shown,
                expected=f"a folder at {folder}",
                found=str(exc),
                next_step="Remove the file, or give another path.",
            ) from exc
        with handle:
            while True:
                name = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
                temporary = os.path.join(handle.path, name)
                self._stream = open(temporary, "x+b", buffering=0)  # noqa: SIM115 (by commit)
                _locked(self._stream.fileno(), fcntl.LOCK_EX)
                if os.path.lexists(temporary):
                    break
                self._stream.close()  # `sweep` removed it before we locked it
        self._temporary = os.path.join(folder, name)
        self._finished = False
        self._bytes = DirectWrites(self._stream.fileno(), self._temporary, read_back=read_back)

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        with translated_errors(self._shown):
            self._bytes.write(view)
        return len(view)

    def copy_from(self, source: int, size: int) -> None:
        """Write `size` bytes of the open file `source` by sendfile; call it alone."""
        with translated_errors(self._shown):
            done = 0
            while done < size:
                count = os.sendfile(self._stream.fileno(), source, done, min(size - done, 1 << 30))
                if count == 0:
                    raise OSError(errno.EIO, "the source became shorter while it was copied")
                done += count

    @override
    def commit(self) -> None:
        folder = os.path.dirname(self._path)
        with translated_errors(self._shown, "write"):
            # fsync before the rename: a crash must not leave the name with half of the bytes.
            self._bytes.finish()
            os.fsync(self._stream.fileno())
            self.read_back = self._bytes.crc32c()
            self._bytes.close()
            with open_folder_handle(self._uri, folder) as handle:
                os.replace(
                    os.path.join(handle.path, os.path.basename(self._temporary)),
                    os.path.join(handle.path, os.path.basename(self._path)),
                )
            self._finished = True
            self._stream.close()  # last: its lock protects it from `sweep` until the rename
            with durable_entries(folder):
                fsync_path(folder)

    @override
    def abort(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._bytes.close()
        self._stream.close()
        folder, name = os.path.split(self._temporary)
        with (
            contextlib.suppress(FileNotFoundError, ConfinementError),
            open_folder_handle(self._uri, folder) as handle,
        ):
            os.unlink(os.path.join(handle.path, name))
