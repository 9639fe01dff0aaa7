"""Files in any store that fsspec supports; `files_gcs` is specific to GCS."""

import builtins
import contextlib
import io
from typing import Any, BinaryIO, cast

import fsspec
from typing_extensions import override

from cairn.storage.errors import NotFoundError, StoreUnavailableError
from cairn.storage.store.deadlines import call_with_deadline, deadline_after
from cairn.storage.store.files import (
    BLOCK_BYTES,
    FileEntry,
    Files,
    FileStat,
    FileWriter,
    request,
    translated_errors,
)
from cairn.storage.store.requests import timed_request
from cairn.storage.store.uri import StoreURI, check_path

__all__ = ["RemoteFiles", "UploadWriter"]

_DISCARD_SECONDS = 5.0
"""Most seconds to try to cancel an upload in the store."""


class RemoteFiles(Files):
    """`Files` over fsspec."""

    def __init__(self, uri: StoreURI) -> None:
        super().__init__(uri)
        self._fs = self._connect()
        self._root = "/".join(filter(None, (uri.bucket, uri.path)))

    def _connect(self) -> Any:
        try:
            return fsspec.filesystem(self.uri.scheme, use_listings_cache=False)
        except ImportError as exc:
            raise StoreUnavailableError(
                "no way to speak to this store",
                path=self.uri,
                expected="the package that fsspec needs for it",
                found=str(exc),
                next_step="Install it, for example: pip install s3fs.",
            ) from exc

    @override
    def stat(self, rel: str) -> FileStat:
        metadata = request("stat", self.uri / rel, self._fs.info, self._path(rel))
        if metadata["type"] != "file":
            raise NotFoundError(path=self.uri / rel, expected="a file", found="a folder")
        etag = metadata.get("ETag") or metadata.get("etag")
        return FileStat(int(metadata["size"]), str(etag).strip('"') if etag else None)

    @override
    def list(self, rel: str = "") -> builtins.list[FileEntry]:
        folder = self._folder(rel)
        with translated_errors(folder, "list"):
            try:
                items = call_with_deadline(
                    lambda: self._fs.ls(folder, detail=True, refresh=True), path=self.uri
                )
            except (FileNotFoundError, NotADirectoryError):
                return []
        entries = []
        for item in items:
            parent, _, name = str(item["name"]).strip("/").rpartition("/")
            if name and parent == folder.strip("/"):
                is_dir = item["type"] == "directory"
                entries.append(FileEntry(name, 0 if is_dir else int(item["size"]), is_dir))
        return sorted(entries)

    @override
    def walk(self, rel: str = "") -> builtins.list[FileEntry]:
        folder = self._folder(rel)
        with translated_errors(folder, "list"):
            self._fs.invalidate_cache()
            try:
                items = call_with_deadline(
                    lambda: self._fs.find(folder, detail=True), path=self.uri
                )
            except FileNotFoundError:
                return []
        prefix = f"{folder.strip('/')}/" if folder else ""
        return sorted(
            FileEntry(name.strip("/").removeprefix(prefix), int(item["size"]), False)
            for name, item in items.items()
            if name.strip("/").startswith(prefix)
        )

    @override
    def open_read(self, rel: str) -> BinaryIO:
        stream = request(
            "stat",  # opening requests the file's length
            self.uri / rel,
            self._fs.open,
            self._path(rel),
            "rb",
            block_size=BLOCK_BYTES,
            cache_type="readahead",
        )
        return cast("BinaryIO", io.BufferedReader(_Stream(stream, self.uri / rel)))

    @override
    def read_range(self, rel: str, start: int, end: int) -> bytes:
        size = self.stat(rel).size
        low, high = min(start, size), min(end, size)
        if low >= high:
            return b""
        return bytes(
            request("read", self.uri / rel, self._fs.cat_file, self._path(rel), start=low, end=high)
        )

    @override
    def open_write(self, rel: str, *, read_back: bool = False) -> FileWriter:
        path = self._path(rel)
        if self.uri.scheme == "memory":
            return _MemoryWriter(self._fs, path)
        stream = request("write", self.uri / rel, self._fs.open, path, "wb", block_size=BLOCK_BYTES)
        return UploadWriter(stream, self.uri / rel)

    @override
    def delete_tree(self, rel: str) -> None:
        with translated_errors(self.uri / rel, "delete"):
            try:
                call_with_deadline(
                    lambda: self._fs.rm(self._path(rel), recursive=True), path=self.uri / rel
                )
            except FileNotFoundError:
                return

    @override
    def _copy_within(self, source: str, target: Files, target_rel: str) -> bool:
        if not isinstance(target, RemoteFiles):
            return False
        if type(self._fs) is not type(target._fs):
            return False
        paths = self._path(source), target._path(target_rel)
        with timed_request("copy", self.uri / source):
            call_with_deadline(lambda: self._fs.cp_file(*paths), path=self.uri / source)
        return True

    def _path(self, rel: str) -> str:
        return "/".join(filter(None, (self._root, check_path(rel, within=self.uri))))

    def _folder(self, rel: str) -> str:
        return "/".join(filter(None, (self._root, self._checked_folder(rel))))


class _Stream(io.RawIOBase):
    """Reads of an fsspec file, each with a deadline."""

    def __init__(self, stream: Any, shown: StoreURI) -> None:
        self._stream = stream
        self._shown = shown

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._stream.seek(offset, whence))

    @override
    def tell(self) -> int:
        return int(self._stream.tell())

    def readinto(self, buffer: Any) -> int:
        data: bytes = request("read", self._shown, self._stream.read, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @override
    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


class UploadWriter(FileWriter):
    """Stream into an fsspec file, which its `close` commits."""

    def __init__(self, stream: Any, shown: StoreURI) -> None:
        self._stream = stream
        self._shown = shown
        self._finished = False

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        return int(request("write", self._shown, self._stream.write, data))

    @override
    def commit(self) -> None:
        request("write", self._shown, self._stream.close)
        self._finished = True

    @override
    def abort(self) -> None:
        if self._finished:
            return
        self._finished = True
        with contextlib.suppress(Exception), deadline_after(_DISCARD_SECONDS):
            call_with_deadline(
                self._stream.discard, path=self._shown
            )  # if this fails, the store expires it
        # Otherwise the garbage collector would close the file, which completes its upload.
        self._stream.closed = True


class _MemoryWriter(FileWriter):
    """Buffer of the whole file: fsspec's memory store shows a file as soon as it is opened."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs = filesystem
        self._path = path
        self._data = bytearray()

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._data += memoryview(data).cast("B")
        return memoryview(data).nbytes

    @override
    def commit(self) -> None:
        self._fs.pipe_file(self._path, bytes(self._data))

    @override
    def abort(self) -> None:
        self._data.clear()
