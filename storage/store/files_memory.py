"""Files in this process's memory, by fsspec: for tests, as runs are not kept there."""

import builtins
from typing import BinaryIO, cast

import fsspec
from typing_extensions import override

from cairn.storage.errors import NotFoundError
from cairn.storage.store.files import FileEntry, Files, FileStat, FileWriter, translated_errors
from cairn.storage.store.uri import StoreURI, check_path

__all__ = ["MemoryFiles"]


class MemoryFiles(Files):
    """`Files` of a folder in fsspec's memory."""

    def __init__(self, uri: StoreURI) -> None:
        super().__init__(uri)
        self._fs = fsspec.filesystem("memory", use_listings_cache=False)

    @override
    def stat(self, rel: str) -> FileStat:
        with translated_errors(self.uri / rel):
            metadata = self._fs.info(self._path(rel))
        if metadata["type"] != "file":
            raise NotFoundError(path=self.uri / rel, expected="a file", found="a folder")
        return FileStat(int(metadata["size"]), None)

    @override
    def list(self, rel: str = "") -> builtins.list[FileEntry]:
        entries: dict[str, FileEntry] = {}
        for file in self.walk(rel):
            name, slash, _ = file.name.partition("/")
            entries[name] = FileEntry(name, 0, True) if slash else file
        return sorted(entries.values())

    @override
    def walk(self, rel: str = "") -> builtins.list[FileEntry]:
        folder = "/".join(filter(None, (self.uri.path, self._checked_folder(rel))))
        prefix = f"{folder}/" if folder else ""
        found = self._fs.find(folder, detail=True).items()
        return sorted(
            FileEntry(name.strip("/").removeprefix(prefix), int(item["size"]), False)
            for name, item in found
            if name.strip("/").startswith(prefix)
        )

    @override
    def open_read(self, rel: str) -> BinaryIO:
        with translated_errors(self.uri / rel):
            return cast("BinaryIO", self._fs.open(self._path(rel), "rb"))

    @override
    def read_range(self, rel: str, start: int, end: int) -> bytes:
        size = self.stat(rel).size
        low, high = min(start, size), min(end, size)
        return bytes(self._fs.cat_file(self._path(rel), low, high)) if low < high else b""

    @override
    def open_write(self, rel: str, *, read_back: bool = False) -> FileWriter:
        return _MemoryWriter(self, self._path(rel))

    @override
    def delete_tree(self, rel: str) -> None:
        path = self._path(rel)
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    def _path(self, rel: str) -> str:
        return "/".join(filter(None, (self.uri.path, check_path(rel, within=self.uri))))


class _MemoryWriter(FileWriter):
    """Buffer of the whole file: fsspec's memory shows a file as soon as it is opened."""

    def __init__(self, files: MemoryFiles, path: str) -> None:
        self._files, self._path = files, path
        self._data = bytearray()

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._data += memoryview(data).cast("B")
        return memoryview(data).nbytes

    @override
    def commit(self) -> None:
        self._files._fs.pipe_file(self._path, bytes(self._data))

    @override
    def abort(self) -> None:
        self._data.clear()
