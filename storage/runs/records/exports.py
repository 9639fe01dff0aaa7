"""Exports of a step: their folders, their manifests, and the published try of each.

An export is written into `exports/<step>.<attempt>/<kind>-<digest>/<try>/`. It is published by one
object beside that folder, which is created only if absent. Other tries in the folder are not part
of the export. If a try finds no room left in the store, `<try>.json` lists its complete files, and
the next try moves them into its own folder.
"""

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, FailFast, Field

from cairn.storage.errors import PreconditionFailedError
from cairn.storage.runs.records.layout import (
    EXPORTS,
    MAX_NUMBER,
    export_dir,
    export_manifest,
    export_manifests,
    parse_export_manifest,
)
from cairn.storage.runs.records.placed import (
    UNREADABLE,
    put_record,
    read_record,
    read_records,
    write_record,
)
from cairn.storage.store.bounds import FreeJson
from cairn.storage.store.clock import Moment, from_rfc3339
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.records import Record, canonical_json
from cairn.storage.store.uri import StoreURI

__all__ = [
    "ExportFile",
    "ExportKey",
    "ExportManifest",
    "LeftFile",
    "LeftTry",
    "delete_left",
    "delete_tries",
    "exports_of_run",
    "find_export",
    "leave_try",
    "left_record",
    "left_tries",
    "publish_export",
    "published_exports",
    "withdraw_export",
]

_DIGEST_DIGITS = 32
_MOST_FILES: Final = 100_000
_STEP: Final = re.compile(r"[0-9]{1,18}\.[0-9]{1,18}")

LEFT_SECONDS: Final = 24 * 3600.0
"""Seconds for which the files of a failed try are kept for the next one."""


class ExportFile(BaseModel):
    """File of an export.

    Attributes:
        name: path relative to the export's folder.
        size: size in bytes.
        crc32c: eight hexadecimal digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size: Annotated[int, Field(ge=0)]
    crc32c: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class ExportManifest(Record):
    """Manifest of an export: its source, its options, and the published try.

    Attributes:
        kind: "convert" or "gather".
        step: step number.
        attempt: the attempt that wrote the step.
        source: digest of the step's manifest, "sha256:…".
        options: the requested options, as JSON.
        rule_version: version of the conversion rules.
        folder: name of the published try.
        created: time of the export, RFC 3339 in UTC.
        files: every file, by name.
    """

    FORMAT: ClassVar[str] = "cairn.export"

    kind: Annotated[str, Field(pattern="^(convert|gather)$")]
    step: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    attempt: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    source: str
    options: FreeJson
    rule_version: int
    folder: str
    created: Moment
    files: Annotated[tuple[ExportFile, ...], Field(max_length=_MOST_FILES), FailFast()]

    @property
    def nbytes(self) -> int:
        """Sum of the files' sizes in bytes."""
        return sum(file.size for file in self.files)

    @property
    def key(self) -> "ExportKey":
        """Key of the export."""
        return ExportKey.of(
            step=self.step,
            attempt=self.attempt,
            kind=self.kind,
            source=self.source,
            options=self.options,
            rule_version=self.rule_version,
        )


class LeftFile(ExportFile):
    """Complete file of a failed try, which was read back and compared.

    Attributes:
        notes: further results of its writer, as JSON.
    """

    notes: FreeJson = {}


class LeftTry(Record):
    """Record of the complete files of a try that found no room left; the try has ended.

    Attributes:
        by: version of Cairn that wrote the files. Another version may write other bytes.
        at: time at which the try ended, RFC 3339 in UTC.
        files: the complete files, by name. A later try moves files into its own folder.
    """

    FORMAT: ClassVar[str] = "cairn.export-try"

    by: str
    at: Moment
    files: tuple[LeftFile, ...]

    def is_old(self, now: datetime) -> bool:
        """Return True if the try ended `LEFT_SECONDS` ago or earlier, so that it is garbage."""
        return now >= from_rfc3339(self.at) + timedelta(seconds=LEFT_SECONDS)


@dataclass(frozen=True)
class ExportKey:
    """Key of an export within its run: the same source, options and rules give the same key.

    Attributes:
        step: step number.
        attempt: the attempt that wrote the step.
        kind: "convert" or "gather".
        digest: hexadecimal digest of source, options and rule version.
    """

    step: int
    attempt: int
    kind: str
    digest: str

    @classmethod
    def of(
        cls,
        *,
        step: int,
        attempt: int,
        kind: str,
        source: str,
        options: Mapping[str, Any],
        rule_version: int,
    ) -> "ExportKey":
        """Return the key of an export; the arguments are as in `ExportManifest`."""
        identity = {"source": source, "options": dict(options), "rule_version": rule_version}
        digest = hashlib.sha256(canonical_json(identity)).hexdigest()[:_DIGEST_DIGITS]
        return cls(step, attempt, kind, digest)

    @property
    def manifest(self) -> str:
        """Name of the export's manifest in the run."""
        return export_manifest(self.step, self.attempt, self.kind, self.digest)

    @property
    def folder(self) -> str:
        """Folder in the run of all tries of the export."""
        return self.manifest.removesuffix(".json")

    def try_folder(self, name: str) -> str:
        """Return the folder in the run of the try with this name."""
        return export_dir(self.step, self.attempt, self.kind, self.digest, name)


def find_export(objects: ObjectStore, key: ExportKey) -> ExportManifest | None:
    """Return the published export with that key, or None.

    Raises:
        UnsupportedFormatError, CorruptionError: the export's manifest can't be read.
    """
    stored = read_record(objects, key.manifest, ExportManifest)
    return None if stored is None else stored[0]


def published_exports(
    objects: ObjectStore, step: int, attempt: int, kind: str
) -> list[ExportManifest]:
    """Return the published exports of a step that are of one kind.

    Raises:
        UnsupportedFormatError, CorruptionError: a manifest can't be read.
    """
    folder = export_manifests(step, attempt)
    names = [
        name
        for name in objects.children(folder)
        if name.startswith(f"{folder}/{kind}-") and name.endswith(".json")
    ]
    return list(read_records(objects, names, ExportManifest.parse).values())


def exports_of_run(objects: ObjectStore, most: int) -> tuple[list[ExportManifest], bool]:
    """Return the published exports of a run, highest steps first, and whether there are more.

    Args:
        objects: the run's objects.
        most: the most exports to return; it also bounds how many steps' folders are listed.

    Raises:
        UnsupportedFormatError, CorruptionError: a manifest can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    entries = open_files(objects.uri).list(EXPORTS.removesuffix("/"))
    steps = [entry.name for entry in entries if entry.is_dir and _STEP.fullmatch(entry.name)]
    steps.sort(key=lambda name: [-int(part) for part in name.split(".")])
    names: list[str] = []
    for folder in steps:
        if len(names) > most:
            break
        children = objects.children(f"{EXPORTS}{folder}")
        names += [name for name in children if parse_export_manifest(name) is not None]
    exports = read_records(objects, names[:most], ExportManifest.parse)
    return [exports[name] for name in names[:most] if name in exports], len(names) > most


def publish_export(
    objects: ObjectStore, key: ExportKey, manifest: ExportManifest
) -> ExportManifest:
    """Publish a try unless another was published first; return the published manifest."""
    try:
        return write_record(objects, key.manifest, manifest, generation=None)[0]
    except PreconditionFailedError:
        winner = find_export(objects, key)
        if winner is None:  # the other try was withdrawn meanwhile
            raise
        # Its publisher may have died before the fsync.
        objects.sync(key.manifest)
        return winner


def withdraw_export(objects: ObjectStore, key: ExportKey, manifest: ExportManifest) -> None:
    """Delete the export's manifest if it is still `manifest`; the export's files stay."""
    stored = read_record(objects, key.manifest, ExportManifest)
    if stored is None or stored[0] != manifest:
        return
    with contextlib.suppress(PreconditionFailedError):  # another was published meanwhile
        objects.delete_if(key.manifest, generation=stored[1])


def left_record(key: ExportKey, folder: str) -> str:
    """Return the name in the run of the record of the failed try `folder`."""
    return f"{key.try_folder(folder)}.json"


def leave_try(objects: ObjectStore, key: ExportKey, folder: str, left: LeftTry) -> None:
    """Record the complete files of a failed try for the next one; the try must have ended.

    Raises:
        StoreFullError: no space or quota left even for the record.
    """
    put_record(objects, left_record(key, folder), left)


def left_tries(objects: ObjectStore, key: ExportKey) -> dict[str, LeftTry]:
    """Return the readable records of failed tries, by folder, latest first."""
    tries: dict[str, LeftTry] = {}
    for name in objects.children(key.folder):
        if name.endswith(".json"):
            with contextlib.suppress(*UNREADABLE):  # damaged: its files are written anew
                read = read_record(objects, name, LeftTry)
                if read is not None:
                    folder = name.removeprefix(f"{key.folder}/").removesuffix(".json")
                    tries[folder] = read[0]
    return dict(sorted(tries.items(), key=lambda entry: from_rfc3339(entry[1].at), reverse=True))


def delete_left(run: StoreURI, key: ExportKey) -> None:
    """Remove the files and records of failed tries, but not the published try."""
    for entry in open_files(run).list(key.folder):
        if entry.name.endswith(".json"):  # includes records that can't be read
            delete_tries(run, key, entry.name.removesuffix(".json"))


def delete_tries(run: StoreURI, key: ExportKey, prefix: str, *, keep_left: bool = False) -> None:
    """Remove the tries whose names start with `prefix`, except the published one.

    If a try is published while it is being removed, it is withdrawn, so that no export is published
    without its files.

    Args:
        run: the run's folder.
        key: the export's key.
        prefix: prefix of the tries' names; "" removes all tries.
        keep_left: whether to keep the recorded files of failed tries.
    """
    objects, files = ObjectStore.open(run), open_files(run)
    counting = find_export(objects, key)
    left = left_tries(objects, key) if keep_left else {}
    removed = set()
    for entry in files.list(key.folder):
        folder = entry.name if entry.is_dir else entry.name.removesuffix(".json")
        published = counting is not None and counting.folder == folder
        if not entry.name.startswith(prefix) or (entry.is_dir and published):
            continue
        if folder not in left:
            files.delete_tree(f"{key.folder}/{entry.name}")
            removed.add(folder)
        elif entry.is_dir:
            whole = {file.name for file in left[folder].files}
            files.sweep(f"{key.folder}/{folder}")
            for file in files.walk(f"{key.folder}/{folder}"):
                if file.name not in whole:
                    files.delete_tree(f"{key.folder}/{folder}/{file.name}")
    # A removed try may have been published meanwhile.
    now = find_export(objects, key) if removed else None
    if now is not None and now.folder in removed:
        withdraw_export(objects, key, now)
