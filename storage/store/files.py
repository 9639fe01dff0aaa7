"""Large files below one folder, over any store: stat, list, stream in and out, copy.

`open_files` picks the store. What is written becomes visible whole or not at all: on a local disk
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

from cairn.storage.errors import NotFoundError, StorageError, StoreFullError, translate
from cairn.storage.store.calls import Operation, called
from cairn.storage.store.deadlines import answer
from cairn.storage.store.uri import StoreURI, check_segment

__all__ = ["BLOCK_BYTES", "Entry", "FileStat", "FileWriter", "Files", "Held"]

BLOCK_BYTES = 8 << 20
"""Size of the blocks that are streamed, in bytes."""

T = TypeVar("T")


class FileStat(NamedTuple):
    """One file.

    Attributes:
        size: bytes.
        etag: changes whenever the bytes do; None if the store has none.
        crc32c: of the bytes, eight hexadecimal digits, if the store knows it.
    """

    size: int
    etag: str | None
    crc32c: str | None = None


class Entry(NamedTuple):
    """One name in a listing.

    Attributes:
        name: one segment from `Files.list`; the path from the listed folder from `Files.walk`.
        size: bytes; 0 for a folder.
        is_dir: True for a folder.
        crc32c: of the bytes, eight hexadecimal digits, if the store knows it.
        modified_ns: when the file was modified last, if it lies on a disk.
    """

    name: str
    size: int
    is_dir: bool
    crc32c: str | None = None
    modified_ns: int | None = None


class Held(NamedTuple):
    """A file that takes room in a store.

    Attributes:
        name: the path from the listed folder.
        size: bytes.
        identity: names that have the same share their bytes; None: nobody shares them.
    """

    name: str
    size: int
    identity: tuple[int, int] | None


class FileWriter(abc.ABC):
    """A file being written. As a context manager it commits on success and aborts on an error.

    Attributes:
        read_back: once it is committed: crc32c, as eight hexadecimal digits, of the bytes that the
            store gave back before the file got its name; None: they were not read.
    """

    read_back: str | None = None

    @abc.abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data`; how many bytes that was.

        Raises:
            StoreFullError: no space or quota left.
        """

    @abc.abstractmethod
    def commit(self) -> None:
        """Make the file durable and visible under its name, replacing what was there."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop what was written; nothing becomes visible. Safe to call twice."""

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
    """The files below one folder. Names are relative to it; safe for use by many threads.

    Every method raises `InvalidURIError` for a name that could lead out of the folder, and
    `StoreUnavailableError` if the store gives no answer.
    """

    def __init__(self, uri: StoreURI) -> None:
        self.uri = uri

    def __repr__(self) -> str:
        return f"Files({str(self.uri)!r})"

    @abc.abstractmethod
    def stat(self, rel: str) -> FileStat:
        """Size and etag of the file `rel`.

        Raises:
            NotFoundError: there is no such file.
        """

    @abc.abstractmethod
    def list(self, rel: str = "") -> builtins.list[Entry]:
        """What lies directly in the folder `rel`, by name; nothing if it does not exist."""

    @abc.abstractmethod
    def walk(self, rel: str = "") -> builtins.list[Entry]:
        """Every file below the folder `rel`, by path; nothing if it does not exist."""

    def room(self) -> int | None:
        """Bytes that can be written before the store is full; None if it does not tell."""
        return None

    def held(self, rel: str = "") -> builtins.list[Held]:
        """Whatever takes room below the folder `rel`, by path, what no listing shows too."""
        return [Held(entry.name, entry.size, None) for entry in self.walk(rel)]

    @abc.abstractmethod
    def open_read(self, rel: str) -> BinaryIO:
        """The file `rel`, open for reading and seeking.

        Raises:
            NotFoundError: there is no such file.
        """

    @abc.abstractmethod
    def read_range(self, rel: str, start: int, end: int) -> bytes:
        """Bytes from `start` up to, not including, `end`; fewer at the end of the file.

        Raises:
            NotFoundError: there is no such file.
        """

    def read_into(self, rel: str, start: int, buffer: memoryview) -> int:
        """Bytes from `start` on into `buffer`; how many: fewer at the end of the file.

        Raises:
            NotFoundError: there is no such file.
        """
        data = self.read_range(rel, start, start + buffer.nbytes)
        buffer[: len(data)] = data
        return len(data)

    @abc.abstractmethod
    def open_write(self, rel: str, *, read_back: bool = False) -> FileWriter:
        """A stream into the file `rel`; see `FileWriter`.

        Args:
            rel: the file.
            read_back: read what was written while the rest is, on a disk. Stores that tell a
                checksum (`stat`) are not asked for the bytes, and others read them afterwards.
        """

    @abc.abstractmethod
    def delete_tree(self, rel: str) -> None:
        """Remove the file or folder `rel` and all below it; fine if there is none."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Write files of this folder that belong together: waits for others that do.

        Who died holds nobody up. Only on a disk that has locks: elsewhere nobody waits.
        """
        yield

    def sweep(self, rel: str) -> None:
        """Remove what killed writers left in the folder `rel` and below.

        Halves of files, and lock files. On a disk without locks they stay. Object stores have
        neither.
        """
        self._checked_folder(rel)

    @abc.abstractmethod
    def _copy_within(self, source: str, target: "Files", target_rel: str) -> bool:
        """Copy inside the store if it can; False if it can't."""

    def exists(self, rel: str) -> bool:
        """True if `rel` is a file or a folder that holds something."""
        try:
            self.stat(rel)
        except NotFoundError:
            return bool(self.list(rel))
        return True

    def copy(self, rel: str, target: "Files", target_rel: str) -> None:
        """Copy the file `rel` to `target_rel` of `target`, inside the store where it can.

        Raises:
            NotFoundError: there is no such file.
            StoreFullError: no space or quota left.
        """
        try:
            if type(self) is type(target) and self._copy_within(rel, target, target_rel):
                return
            with self.open_read(rel) as source, target.open_write(target_rel) as sink:
                while block := source.read(BLOCK_BYTES):
                    sink.write(block)
        except StorageError:
            raise
        except Exception as exc:
            known = translate(exc, path=self.uri / rel)
            if isinstance(known, StoreFullError):  # what is full is the target's store
                known = translate(exc, path=target.uri / target_rel)
            raise known from exc

    def move(self, rel: str, target: "Files", target_rel: str) -> None:
        """Give the file `rel` another name, `target_rel` of `target`, in place of what has it.

        On a disk it takes no room. Elsewhere it is a copy, whose source goes once it is whole.

        Raises:
            NotFoundError: there is no such file.
            StoreFullError: no space or quota left.
        """
        if type(self) is type(target) and self._move_within(rel, target, target_rel):
            return
        self.copy(rel, target, target_rel)
        self.delete_tree(rel)

    def _move_within(self, source: str, target: "Files", target_rel: str) -> bool:
        """Move a file without copying it, if the store can; False if it can't."""
        return False

    def _checked(self, rel: str) -> str:
        for segment in rel.split("/"):
            check_segment(segment, within=f"{self.uri}/{rel}")
        return rel

    def _checked_folder(self, rel: str) -> str:
        folder = rel.removesuffix("/")
        return self._checked(folder) if folder else ""


@contextmanager
def mapped(path: object, operation: Operation | None = None) -> Iterator[None]:
    """Turn whatever goes wrong inside into a `StorageError` that names `path`.

    Args:
        path: what is asked for.
        operation: what is done inside is one request of this kind; None: none, or several.
    """
    with called(operation, path) if operation else contextlib.nullcontext():
        try:
            yield
        except StorageError:
            raise
        except Exception as exc:
            raise translate(exc, path=path) from exc


def asked(
    operation: Operation, path: object, call: Callable[..., T], *args: Any, **options: Any
) -> T:
    """What a call of fsspec's gives, which waits without a limit of its own.

    Raises:
        StoreUnavailableError: nothing was answered for too long.
        StorageError: what else went wrong, for `path`.
    """
    with mapped(path, operation):
        return answer(lambda: call(*args, **options), path=path)
