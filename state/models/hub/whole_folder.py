"""Write of a folder whose files belong together, with protection from a second writer.

On a disk the second writer waits for the first. In an object store it can't be stopped. So each
writer checks at the end whether all files are still its own; if the folder has files of two
writers, the one that checks last raises an error.
"""

from __future__ import annotations

import google_crc32c
import numpy as np

from cairn.storage.errors import CorruptionError, NotFoundError
from cairn.storage.safetensors.writer import Shard, shard_header, write_shard
from cairn.storage.store.files import Files


class WholeFolder:
    """Writer of the files of one folder; use it within `files.exclusive()`.

    Args:
        files: the folder.
        last: names of the files that mark the folder as complete. Existing ones are removed before
            any other file is replaced.
    """

    def __init__(self, files: Files, *last: str) -> None:
        self.files = files
        self._last = last
        self._written: dict[str, tuple[int, str | None, str]] = {}

    def write_shard(self, shard: Shard) -> None:
        """Write one file of weights; see `storage.safetensors.write_shard`.

        Raises:
            CorruptionError: another writer has removed the new file.
        """
        missing = len(shard_header(shard)) + shard.nbytes
        checksum = 0

        def on_data(data: memoryview) -> None:
            nonlocal checksum
            checksum = google_crc32c.extend(checksum, np.frombuffer(data, np.uint8))

        def on_bytes(count: int) -> None:
            nonlocal missing
            missing -= count
            if not missing:  # all bytes are written, and the file is about to replace the old one
                self._begin()

        write_shard(self.files, shard.file_name, shard, on_data=on_data, on_bytes=on_bytes)
        self._note(shard.file_name, checksum)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file.

        Raises:
            CorruptionError: another writer has removed the new file.
        """
        self._begin()
        with self.files.open_write(name) as sink:
            sink.write(data)
        self._note(name, google_crc32c.value(data))

    def check(self) -> None:
        """Check that each file that this object wrote is still in the folder, and unchanged.

        Files that only another writer wrote are not noticed.

        Raises:
            CorruptionError: another writer has replaced or removed files; all are listed.
        """
        problems = []
        for name, (size, etag, crc32c) in self._written.items():
            try:
                stat = self.files.stat(name)
            except NotFoundError:
                problems.append(f"{name}: removed")
                continue
            same = (stat.size, stat.etag) == (size, etag)
            if not same or stat.crc32c not in (None, crc32c):
                problems.append(f"{name}: replaced")
        if problems:
            raise self._shared(problems)

    def _begin(self) -> None:
        if not self._written:
            for name in self._last:
                self.files.delete_tree(name)

    def _note(self, name: str, checksum: int) -> None:
        try:
            stat = self.files.stat(name)
        except NotFoundError as exc:
            raise self._shared([f"{name}: removed"]) from exc
        self._written[name] = stat.size, stat.etag, f"{checksum:08x}"

    def _shared(self, problems: list[str]) -> CorruptionError:
        return CorruptionError(
            "two have written this folder at the same time",
            path=self.files.uri,
            expected="the files that were written here",
            found=f"of another: {', '.join(problems)}",
            next_step="Write it again, one writer at a time; it may hold files of both.",
        )
