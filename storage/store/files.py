"""Large files below one folder, over any store: stat, list, stream, copy.

`open_files` picks the store. A written file becomes visible whole or not at all: on a local disk
through a synced temporary file and a rename, on object stores through an upload that ends in one
commit. Listings are never cached.
"""

import abc
import builtins
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

from cairn.storage.errors import (
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    StoreFullError,
    translate_error,
)
from cairn.storage.store.deadlines import call_with_deadline
from cairn.storage.store.requests import Operation, timed_request
from cairn.storage.store.uri import StoreURI, check_path

__all__ = ["BLOCK_BYTES", "FileEntry", "FileStat", "FileUsage", "FileWriter", "Files"]

BLOCK_BYTES = 8 << 20
"""Size in bytes of the blocks in which files are streamed."""

T = TypeVar("T")


class FileStat(NamedTuple):
    """Metadata of one file.

    Attributes:
        size: size in bytes.
        etag: text that changes whenever the bytes do; None if the store has none.
        crc32c: crc32c of the bytes, eight hexadecimal digits; None if the store has none.
    """

    size: int
    etag: str | None
    crc32c: str | None = None


class FileEntry(NamedTuple):
    """Entry of a listing.

    Attributes:
        name: one segment from `Files.list`; the path from the listed folder from `Files.walk`.
        size: size in bytes; 0 for a folder.
        is_dir: True for a folder.
        crc32c: crc32c of the bytes, eight hexadecimal digits; None if the store has none.
        modified_ns: time of the last modification, in nanoseconds since the epoch, of files on a
            disk; else None.
        etag: as in `FileStat`, of files in a bucket; else None.
    """

    name: str
    size: int
    is_dir: bool
    crc32c: str | None = None
    modified_ns: int | None = None
    etag: str | None = None


class FileUsage(NamedTuple):
    """File that occupies space in a store.

    Attributes:
        name: the path from the listed folder.
        size: size in bytes.
        identity: names with equal identity share their bytes; None: the bytes are not shared.
    """

    name: str
    size: int
    identity: tuple[int, int] | None


class FileWriter(abc.ABC):
    """File being written. As a context manager it commits on success and aborts on an error.

    Attributes:
        read_back: after the commit, the crc32c (eight hexadecimal digits) of the bytes as they were
            read back before the rename; None: they were not read back.
        etag: after the commit, the file's etag; None if the store has none.
    """

    read_back: str | None = None
    etag: str | None = None

    @abc.abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data`; return the number of bytes.

        Raises:
            StoreFullError: no space or quota left.
        """

    @abc.abstractmethod
    def commit(self) -> None:
        """Make the file durable and visible under its name, replacing any other."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop the written bytes, so that the file does not become visible. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


class Files(abc.ABC):
    """Files below one folder. Names are relative to it; safe for use by many threads.

    Every method raises `InvalidURIError` for a name that could lead out of the folder, and
    `StoreUnavailableError` if the store gives no answer.
    """

    def __init__(self, uri: StoreURI) -> None:
        self.uri = uri

    def __repr__(self) -> str:
        return f"Files({str(self.uri)!r})"

    @abc.abstractmethod
    def stat(self, rel: str) -> FileStat:
        """Return the size and etag of the file `rel`.

        Raises:
            NotFoundError: there is no such file.
        """

    @abc.abstractmethod
    def list(self, rel: str = "") -> builtins.list[FileEntry]:
        """Return the entries directly in the folder `rel`, by name; empty if it does not exist."""

    @abc.abstractmethod
    def walk(self, rel: str = "") -> builtins.list[FileEntry]:
        """Return every file below the folder `rel`, by path; empty if it does not exist."""

    def free_bytes(self) -> int | None:
        """Return the bytes that can be written before the store is full; None if unknown."""
        return None

    def usage(self, rel: str = "") -> builtins.list[FileUsage]:
        """Return every file that occupies space below the folder `rel`, hidden files included."""
        return [FileUsage(entry.name, entry.size, None) for entry in self.walk(rel)]

    @abc.abstractmethod
    def open_read(self, rel: str) -> BinaryIO:
        """Return a stream of the file `rel`, for reading and seeking.

        Raises:
            NotFoundError: there is no such file.
        """

    @abc.abstractmethod
    def read_range(self, rel: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to, not including, `end`; fewer at the end of the file.

        Raises:
            NotFoundError: there is no such file.
        """

    def read_into(self, rel: str, start: int, buffer: memoryview) -> int:
        """Read bytes from `start` on into `buffer`; return their number, fewer at the end.

        Raises:
            NotFoundError: there is no such file.
        """
        data = self.read_range(rel, start, start + buffer.nbytes)
        buffer[: len(data)] = data
        return len(data)

    @abc.abstractmethod
    def open_write(self, rel: str, *, read_back: bool = False) -> FileWriter:
        """Return a writer of the file `rel`; see `FileWriter`.

        Args:
            rel: the file.
            read_back: whether to read the file back while it is written; for disks only. Stores
                whose `stat` returns a checksum do not need it; in other stores the caller reads the
                file afterwards.
        """

    @abc.abstractmethod
    def delete_tree(self, rel: str) -> None:
        """Remove the file or folder `rel` and all below it, if it exists."""

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold this folder's lock while a set of files is written; wait for other holders.

        The lock of a process that died is free. Where there are no file locks, this does nothing.
        """
        yield

    def sweep(self, rel: str) -> None:
        """Remove partial files and lock files that killed writers left below the folder `rel`.

        On a disk without locks they stay. Object stores have neither.
        """
        self._checked_folder(rel)

    def _copy_within(self, source: str, target: "Files", target_rel: str, etag: str | None) -> bool:
        """Copy within the store; return False if the store can't.

        Raises:
            PreconditionFailedError: the file's etag is not `etag`.
        """
        return False

    def exists(self, rel: str) -> bool:
        """Return True if `rel` is a file or a folder that is not empty."""
        try:
            self.stat(rel)
        except NotFoundError:
            return bool(self.list(rel))
        return True

    def copy(self, rel: str, target: "Files", target_rel: str, *, etag: str | None = None) -> None:
        """Copy the file `rel` to `target_rel` of `target`, within the store if possible.

        Args:
            rel: the file.
            target: where the copy goes.
            target_rel: its name there.
            etag: etag that the file must have; None: any.

        Raises:
            NotFoundError: there is no such file.
            PreconditionFailedError: the file has another etag.
            StoreFullError: no space or quota left.
        """
        try:
            if type(self) is type(target) and self._copy_within(rel, target, target_rel, etag):
                return
            if etag is not None and (stored := self.stat(rel).etag) != etag:
                raise PreconditionFailedError(
                    "changed by someone else", path=self.uri / rel, expected=etag, found=stored
                )
            with self.open_read(rel) as source, target.open_write(target_rel) as sink:
                while block := source.read(BLOCK_BYTES):
                    sink.write(block)
        except StorageError:
            raise
        except Exception as exc:
            error = translate_error(exc, path=self.uri / rel)
            if isinstance(error, StoreFullError):  # it is the target's store that is full
                error = translate_error(exc, path=target.uri / target_rel)
            raise error from exc

    def move(self, rel: str, target: "Files", target_rel: str) -> None:
        """Rename the file `rel` to `target_rel` of `target`, replacing any other.

        On one disk it takes no space. Otherwise it copies, and removes the source afterwards.

        Raises:
            NotFoundError: there is no such file.
            StoreFullError: no space or quota left.
        """
        if type(self) is type(target) and self._move_within(rel, target, target_rel):
            return
        self.copy(rel, target, target_rel)
        self.delete_tree(rel)

    def _move_within(self, source: str, target: "Files", target_rel: str) -> bool:
        """Rename within the store; return False if the store can't."""
        return False

    def _checked_folder(self, rel: str) -> str:
        folder = rel.removesuffix("/")
        return check_path(folder, within=self.uri) if folder else ""


@contextmanager
def translated_errors(path: object, operation: Operation | None = None) -> Iterator[None]:
    """Map any error in the body of the context to a `StorageError` that names `path`.

    Args:
        path: the object to which the body's requests go.
        operation: kind of request as which the body is reported to listeners; None: it is not
            reported.
    """
    with timed_request(operation, path) if operation else contextlib.nullcontext():
        try:
            yield
        except StorageError:
            raise
        except Exception as exc:
            raise translate_error(exc, path=path) from exc


def request(
    operation: Operation, path: object, call: Callable[..., T], *args: Any, **options: Any
) -> T:
    """Run a call of fsspec, which has no timeout, with a deadline, and return its result.

    Raises:
        StoreUnavailableError: no answer came in time.
        StorageError: any other error, with `path`.
    """
    with translated_errors(path, operation):
        return call_with_deadline(lambda: call(*args, **options), path=path)
