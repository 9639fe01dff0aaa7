"""Assets: small files of a model, such as a tokenizer's, stored once per run by their hash."""

from collections.abc import Mapping
from hashlib import sha256

from cairn.storage.errors import CorruptionError, PreconditionFailedError, UnsupportedLeafError
from cairn.storage.runs.records.layout import ASSETS, asset_file
from cairn.storage.runs.records.manifest import AssetRecord
from cairn.storage.store.bounds import check_not_oversized, check_writable
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.uri import check_segment

__all__ = ["checked_assets", "put_assets", "read_asset"]


def checked_assets(assets: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Return a copy of `assets` if they can be stored and exported again.

    Raises:
        InvalidURIError: a name is not a file name.
        UnsupportedFormatError: a file is too large.
        UnsupportedLeafError: a file's content is not bytes.
    """
    for name, content in (assets or {}).items():
        check_segment(name, within=f"asset {name!r}")
        if isinstance(content, bytes):
            check_writable(f"{ASSETS}{name}", len(content))
        else:
            raise UnsupportedLeafError(
                "not the content of a file",
                path=f"asset {name!r}",
                expected="bytes",
                found=type(content).__name__,
                next_step="Read the file in binary mode.",
            )
    return dict(assets or {})


def put_assets(objects: ObjectStore, assets: Mapping[str, bytes]) -> tuple[AssetRecord, ...]:
    """Store small files by the hash of their content, and return their records.

    Intact files that already exist are not written again.
    """
    records = []
    for name, content in sorted(assets.items()):
        digest = sha256(content).hexdigest()
        key = asset_file(digest)
        try:
            objects.write_if(key, content, generation=None, same_is_success=True)
        except PreconditionFailedError:
            objects.write(key, content)  # the present content does not match its name
        records.append(AssetRecord(name=name, sha256=digest, size=len(content)))
    return tuple(records)


def read_asset(objects: ObjectStore, asset: AssetRecord) -> bytes:
    """Return the bytes of an asset, compared with its hash.

    Raises:
        CorruptionError: the file is missing, or its bytes have changed.
    """
    key = asset_file(asset.sha256)
    stored = objects.read(key)
    if stored is not None:
        check_not_oversized(stored.value, objects.uri / key)
    if stored is None or sha256(stored.value).hexdigest() != asset.sha256:
        raise CorruptionError(
            "an asset is missing or damaged",
            path=objects.uri / key,
            expected=f"the {asset.size} bytes of {asset.name}, sha256 {asset.sha256}",
            found="nothing" if stored is None else f"{len(stored.value)} other bytes",
            next_step="Restore it from a backup, or save the model again with its files.",
        )
    return stored.value
