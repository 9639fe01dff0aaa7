"""From Orbax's commit to a listed step: sync, list, check the fence, write the manifest.

No JAX: everything about the leaves is passed in. Runs in the background thread of a save.
"""

import os
import platform
import socket
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from storage.errors import PreconditionFailedError, translate
from storage.files import Files
from storage.layout import asset_file, manifest_file
from storage.manifest import AssetRecord, Manifest, ObjectRecord
from storage.objects import ObjectStore
from storage.uri import StoreURI

__all__ = ["environment", "list_objects", "publish_manifest", "put_assets", "sync_folder"]

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
        for directory, _, names in os.walk(folder.local_path, topdown=False):
            for name in names:
                _sync(os.path.join(directory, name))
            _sync(directory)
        _sync(folder.parent.local_path)
        _sync(folder.parent.parent.local_path)
    except OSError as exc:
        raise translate(exc, path=folder) from exc


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_objects(folder: StoreURI) -> tuple[ObjectRecord, ...]:
    """Name, size and, where the store knows it, checksum of every file below `folder`."""
    return tuple(
        ObjectRecord(name=entry.name, size=entry.size, crc32c=entry.crc32c)
        for entry in sorted(Files.open(folder).walk())
        if not entry.is_dir
    )


def put_assets(objects: ObjectStore, assets: Mapping[str, bytes]) -> tuple[AssetRecord, ...]:
    """Store small files by the hash of their content; those that are there already stay."""
    records = []
    for name, content in sorted(assets.items()):
        digest = sha256(content).hexdigest()
        key = asset_file(digest)
        try:
            objects.write_if(key, content, generation=None, same_is_success=True)
        except PreconditionFailedError:
            objects.write(key, content)  # what was there was not what its name says
        records.append(AssetRecord(name=name, sha256=digest, size=len(content)))
    return tuple(records)


def publish_manifest(objects: ObjectStore, manifest: Manifest, fence: Callable[[], None]) -> None:
    """Make the step listed: the one moment at which it becomes "verified complete".

    Args:
        objects: the run's objects.
        manifest: what to publish.
        fence: raises if a later attempt has taken the run over; checked right before writing.

    Raises:
        FencedError: a later attempt exists.
        PreconditionFailedError: another manifest is there already.
    """
    fence()
    objects.write_if(
        manifest_file(manifest.step, manifest.attempt),
        manifest.to_bytes(),
        generation=None,
        same_is_success=True,
    )


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
