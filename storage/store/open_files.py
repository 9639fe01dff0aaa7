"""Choice of the `Files` class for a store."""

import os

from cairn.storage.store.files import Files
from cairn.storage.store.files_gcs import GcsFiles
from cairn.storage.store.files_local import LocalFiles
from cairn.storage.store.files_memory import MemoryFiles
from cairn.storage.store.files_s3 import S3Files
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["open_files"]


def open_files(uri: StoreURI | str | os.PathLike[str]) -> Files:
    """Return the files of the folder `uri`, which need not exist.

    Raises:
        InvalidURIError: `uri` is malformed.
        StoreUnavailableError: the Python package for this store is not installed.
    """
    parsed = parse_uri(uri)
    match parsed.scheme:
        case "file":
            return LocalFiles(parsed)
        case "gs":
            return GcsFiles(parsed)
        case "s3":
            return S3Files(parsed)
        case "memory":
            return MemoryFiles(parsed)
