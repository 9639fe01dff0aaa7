"""Bytes on their way in: a file outside the visible store that grows block by block."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from tests.gcs.errors import InvalidRequestError

MD5_LIMIT_BYTES = 256 << 10


def encode_crc32c(value: int) -> str:
    """Base64 of the big-endian checksum, as GCS writes it."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


class StagedFile:
    """A file being written, with its size and checksums so far.

    An existing file is continued: its bytes are read once to bring the checksum up to date.
    MD5 is computed for small files only (it would halve the speed of large ones).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._crc32c = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 (closed in close)
        if self._file.tell():
            self._recount()

    def _recount(self) -> None:
        self.size = 0
        self._crc32c = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        with open(self.path, "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                self._count(block)

    def _count(self, block: bytes) -> None:
        self._crc32c = google_crc32c.extend(self._crc32c, block)
        if self.size + len(block) <= MD5_LIMIT_BYTES:  # else there will be none
            self._md5.update(block)
        self.size += len(block)

    def write(self, block: bytes) -> None:
        """Appends a block."""
        self._count(block)
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) :]

    def truncate(self, size: int) -> None:
        """Cuts back to `size` bytes."""
        if size < self.size:
            os.truncate(self.path, size)
            self._recount()

    @property
    def crc32c(self) -> str:
        return encode_crc32c(self._crc32c)

    @property
    def md5(self) -> str | None:
        """Base64, or None for a file over `MD5_LIMIT_BYTES`."""
        if self.size > MD5_LIMIT_BYTES:
            return None
        return base64.b64encode(self._md5.digest()).decode()

    def verify(self, expected: dict[str, str]) -> None:
        """Holds the bytes against the checksums that the client announced, if any.

        Args:
            expected: base64 by name, `crc32c` and `md5`.

        Raises:
            InvalidRequestError: if one differs, as GCS does.
        """
        for name, announced in expected.items():
            found = self.crc32c if name == "crc32c" else self._full_md5()
            if announced != found:
                raise InvalidRequestError(
                    f"Provided {name.upper()} {announced!r} doesn't match "
                    f"calculated {name.upper()} {found!r}."
                )

    def _full_md5(self) -> str:
        if self.md5 is not None:
            return self.md5
        with open(self.path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()
        return base64.b64encode(digest).decode()

    def close(self) -> None:
        """Ends writing; the file stays."""
        self._file.close()

    def discard(self) -> None:
        """Ends writing and removes the file, if a commit has not moved it."""
        self._file.close()
        self.path.unlink(missing_ok=True)
