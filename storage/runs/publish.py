"""From Orbax's commit to a listed step: sync, list, check the fence, write the manifest.

No JAX: everything about the leaves is passed in. Runs in the background thread of a save.
"""

import errno
import os
import platform
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cairn.storage.errors import translate
from cairn.storage.runs.layout import manifest_file
from cairn.storage.runs.manifest import Manifest, ObjectRecord
from cairn.storage.store import ObjectStore, StoreURI, read_files
from cairn.storage.store.open_files import open_files

__all__ = [
    "environment",
    "list_objects",
    "publish_manifest",
    "sync_folder",
    "sync_names",
]

_PACKAGES = ("cairn-checkpoints", "jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")


def sync_folder(folder: StoreURI) -> None:
    """Have the local disk hold every file and name below `folder`, and the names that lead there.

    Object stores are durable once they answer; for them there is nothing to do.

    Raises:
        StoreFullError: the disk found only now that it is full.
        StoreUnavailableError: the disk failed.
    """
    if folder.scheme != "file":
        return
    try:
        for directory, _, names in os.walk(folder.local_path, topdown=False, onerror=_raised):
            for name in names:
                _sync(os.path.join(directory, name))
            _sync(directory)
        _sync(folder.parent.local_path)
        _sync(folder.parent.parent.local_path)
    except OSError as exc:
        raise translate(exc, path=folder) from exc


def sync_names(run: StoreURI) -> None:
    """Have the local disk hold the names that lead to a run and to its folders.

    What writes an object syncs the folder it lies in, not those above, which it may have made.

    Raises:
        StoreUnavailableError: the disk failed.
    """
    if run.scheme != "file":
        return
    folder = run.local_path
    try:
        _sync(folder)
        while folder != (folder := os.path.dirname(folder)):
            try:
                _sync(folder)
            except PermissionError:  # not ours to look into, so not ours to have made
                return
    except OSError as exc:
        raise translate(exc, path=run) from exc


def _raised(error: OSError) -> None:
    raise error


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:  # some file systems have no such call for folders
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def list_objects(
    folder: StoreURI,
    *,
    known: Mapping[str, str] | None = None,
    contents: Mapping[str, str] | None = None,
) -> tuple[ObjectRecord, ...]:
    """Name, size and checksums of every file below `folder`.

    A crc32c is that of the store's listing where it has one. Files of which none is known are read
    back, several at once, in bounded memory.

    Args:
        folder: a step's folder that nobody writes to any more.
        known: crc32c of files, by name, that was taken as they were written.
        contents: the same of `ContentSum`.

    Raises:
        StoreUnavailableError: the store gives no answer.
    """
    entries = sorted(entry for entry in open_files(folder).walk() if not entry.is_dir)
    listed = {entry.name: entry.crc32c for entry in entries if entry.crc32c is not None}
    sums, told = {**(known or {}), **listed}, dict(contents or {})
    for found in read_files(folder, [entry.name for entry in entries if entry.name not in sums]):
        told[found.name] = found.content
        if found.crc32c is not None:
            sums[found.name] = found.crc32c
    return tuple(
        ObjectRecord(
            name=entry.name,
            size=entry.size,
            crc32c=sums[entry.name],
            content=told.get(entry.name),
        )
        for entry in entries
    )


def publish_manifest(objects: ObjectStore, manifest: Manifest, fence: Callable[[], None]) -> None:
    """Make the step listed: the one moment at which it becomes "verified complete". Durably.

    Args:
        objects: the run's objects.
        manifest: what to publish.
        fence: raises if a later attempt has taken the run over; checked right before writing.

    Raises:
        FencedError: a later attempt exists.
        PreconditionFailedError: another manifest is there already.
    """
    sync_names(objects.uri)  # of what the manifest names, before it
    fence()
    objects.write_if(
        manifest_file(manifest.step, manifest.attempt),
        manifest.to_bytes(),
        generation=None,
        same_is_success=True,
    )
    sync_names(objects.uri)


def environment(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Versions and host, for people who ask later where a checkpoint came from."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "packages": versions,
        **extra,
    }
