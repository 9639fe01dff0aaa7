"""File system of fsspec for `s3://` paths, as far as Orbax needs one.

Orbax reaches `s3://` through etils and fsspec. Where s3fs is installed it is used; without it these
few lines do, over the same connection as everything else.
"""

import io
from typing import Any

import fsspec
from typing_extensions import override

from cairn.storage.errors import NotFoundError
from cairn.storage.store.files_s3 import S3Files
from cairn.storage.store.s3 import call
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["S3Paths", "register_s3_paths"]


def register_s3_paths() -> None:
    """Have fsspec open `s3://` paths with `S3Paths`, unless another package does."""
    try:
        fsspec.get_filesystem_class("s3")
    except ImportError:
        fsspec.register_implementation("s3", S3Paths)


class S3Paths(fsspec.AbstractFileSystem):
    """File system of small files. Folders exist by what lies in them: making one does nothing."""

    protocol = "s3"
    cachable = True

    @override
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        files, name = _split(path)
        try:
            size = files.stat(name).size
        except NotFoundError:
            if not files.list(name):
                raise FileNotFoundError(path) from None
            return {"name": path, "size": 0, "type": "directory"}
        return {"name": path, "size": size, "type": "file"}

    @override
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        folder = parse_uri(_with_scheme(path))
        entries = [
            {
                "name": str(folder / entry.name),
                "size": entry.size,
                "type": "directory" if entry.is_dir else "file",
            }
            for entry in S3Files(folder).list()
        ]
        if not entries:
            raise FileNotFoundError(path)
        return entries if detail else [entry["name"] for entry in entries]

    @override
    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Do nothing."""

    @override
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing."""

    @override
    def rm_file(self, path: str) -> None:
        uri = parse_uri(_with_scheme(path))
        call("delete", uri, "delete_object", Bucket=uri.bucket, Key=uri.path)

    @override
    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        files, name = _split(path)
        if recursive:
            files.delete_tree(name)
        else:
            self.rm_file(path)

    @override
    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        files, name = _split(path)
        if mode == "rb":
            try:
                return files.open_read(name)
            except NotFoundError as exc:
                raise FileNotFoundError(path) from exc
        if mode != "wb":
            raise ValueError(f"mode {mode!r}: expected rb or wb")
        return _NewFile(files.uri / name)


class _NewFile(io.BytesIO):
    """File that is stored when it is closed."""

    def __init__(self, uri: StoreURI) -> None:
        super().__init__()
        self._uri = uri

    @override
    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            uri = self._uri
            call("write", uri, "put_object", Bucket=uri.bucket, Key=uri.path, Body=data)


def _with_scheme(path: str) -> str:
    return path if path.startswith("s3://") else f"s3://{path}"


def _split(path: str) -> tuple[S3Files, str]:
    """Return the files of the folder above `path`, and its name there."""
    uri = parse_uri(_with_scheme(path))
    return S3Files(uri.parent), uri.name
