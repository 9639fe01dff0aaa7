"""Plain files at a place, on a local disk or in a bucket: written, read, measured, deleted.

These are the references of the storage benchmark, and what makes a peer's files durable. A place
is an absolute path or a gs:// URI.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

READ_BYTES = 4 << 20
WRITE_BYTES = 256 << 10
"""Per call, as `cp` does: of larger ones Linux may take several times as long."""

UPLOAD_BYTES = 64 << 20
DATA_FILE = "data"


def in_bucket(place: str) -> bool:
    """Is it a gs:// URI."""
    return place.startswith("gs://")


def connect(place: str) -> None:
    """Imports a bucket's client and makes its first request, so that no clock runs meanwhile."""
    if in_bucket(place):
        importlib.import_module("gcsfs.extended_gcsfs")  # gcsfs does so at its first upload
        _bucket().find(place)


def write(place: str, buffers: Iterable[Any]) -> None:
    """Writes the buffers into one file, one after the other, with one thread, and syncs it."""
    if in_bucket(place):
        with _bucket().open(f"{place}/{DATA_FILE}", "wb", block_size=UPLOAD_BYTES) as sink:
            for buffer in buffers:
                sink.write(buffer)
        return
    os.makedirs(place)
    with open(f"{place}/{DATA_FILE}", "wb", buffering=0) as sink:
        for buffer in buffers:
            left = memoryview(buffer).cast("B")
            while left:
                left = left[sink.write(left[:WRITE_BYTES]) :]
        os.fsync(sink.fileno())


def read(place: str) -> int:
    """Reads every file once, with one thread, into one buffer that is used again; bytes read."""
    total = 0
    if in_bucket(place):
        for name in _bucket().find(place):
            with _bucket().open(name, "rb", block_size=UPLOAD_BYTES) as source:
                while block := source.read(READ_BYTES):
                    total += len(block)
        return total
    buffer = bytearray(READ_BYTES)
    for path in files(place):
        with path.open("rb", buffering=0) as source:
            while count := source.readinto(buffer):
                total += count
    return total


def evict(place: str) -> int:
    """Takes every file out of the page cache, once all is on the disk; bytes of the files."""
    os.sync()
    total = 0
    for path in files(place):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return total


def files(place: str) -> list[Path]:
    """Every file below a place on a local disk, in the order of their names."""
    return sorted(path for path in Path(place).rglob("*") if path.is_file())


def read_whole(place: str) -> bytes:
    """The file that `write` made in a bucket, in memory."""
    content: bytes = _bucket().cat_file(f"{place}/{DATA_FILE}")
    return content


def sent(place: str) -> int:
    """Bytes stored below a place; of a bucket all that were ever sent to its server.

    What is stored without being sent again does not count: a file's further name, an object that
    the store copied.
    """
    if in_bucket(place):
        with urlopen(f"{os.environ['STORAGE_EMULATOR_HOST']}/_double") as answer:
            return int(json.load(answer)["received_bytes"])
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for stat in map(os.stat, files(place))}
    return sum(sizes.values())


def sync(place: str) -> None:
    """Makes what a peer wrote durable: every file and folder. A bucket's objects are already."""
    if in_bucket(place):
        return
    for path in [*files(place), *(path for path in Path(place).rglob("*") if path.is_dir())]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def delete(place: str) -> None:
    """Removes everything below a place, if there is anything."""
    if in_bucket(place):
        bucket = _bucket()
        bucket.invalidate_cache()
        if bucket.find(place):
            bucket.rm(place, recursive=True)
        return
    shutil.rmtree(place, ignore_errors=True)


def slow_down(url: str, seconds: float) -> None:
    """Has the server of a bucket take so long more for each request, from now on."""
    slow = {"kind": "slow", "seconds": seconds, "count": None}
    with urlopen(Request(f"{url}/_double/faults", json.dumps(slow).encode(), method="POST")):
        pass


def _bucket() -> Any:
    import fsspec

    return fsspec.filesystem("gs")
