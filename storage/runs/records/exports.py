"""Exports of a step: where one lies, what its manifest says, which try counts.

An export is written into `exports/<step>.<attempt>/<kind>-<digest>/<try>/` and published by one
object beside that folder, created if absent. Whatever else lies in the folder does not count. Of a
try that ran out of room, `<try>.json` says which of its files are whole: the next try takes them.
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
from cairn.storage.store import (
    FreeJson,
    Moment,
    ObjectStore,
    Record,
    StoreURI,
    canonical_json,
    from_rfc3339,
    open_files,
)

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
"""How long what a try has left waits for the next one, before it is garbage."""


class ExportFile(BaseModel):
    """One file of an export.

    Attributes:
        name: relative to the export's folder.
        size: bytes.
        crc32c: eight hexadecimal digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size: Annotated[int, Field(ge=0)]
    crc32c: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class ExportManifest(Record):
    """What was made of which step, how, and which try counts.

    Attributes:
        kind: "convert", "gather".
        step: step number.
        attempt: the attempt that wrote the step.
        source: digest of the step's manifest, "sha256:…".
        options: what was asked for; JSON.
        rule_version: of the rules that made it.
        folder: name of the try.
        created: RFC 3339 in UTC.
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
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class LeftFile(ExportFile):
    """One file of a try that ran out of room: written whole, read back and compared.

    Attributes:
        notes: what its writer found besides; JSON.
    """

    notes: FreeJson = {}


class LeftTry(Record):
    """What is whole of a try that ran out of room. Nobody writes that try any more.

    Attributes:
        by: version of Cairn that wrote it. Another may write other bytes.
        at: when it was left; RFC 3339 in UTC.
        files: those that are whole, by name. Who takes one moves it away.
    """

    FORMAT: ClassVar[str] = "cairn.export-try"

    by: str
    at: Moment
    files: tuple[LeftFile, ...]

    def is_old(self, now: datetime) -> bool:
        """Whether it has waited long enough."""
        return now >= from_rfc3339(self.at) + timedelta(seconds=LEFT_SECONDS)


@dataclass(frozen=True)
class ExportKey:
    """Names an export within its run: the same source, options and rules are the same export.

    Attributes:
        step: step number.
        attempt: the attempt that wrote the step.
        kind: "convert", "gather".
        digest: hexadecimal; of source, options and rule version.
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
        """The key of what these make; arguments as in `ExportManifest`."""
        identity = {"source": source, "options": dict(options), "rule_version": rule_version}
        digest = hashlib.sha256(canonical_json(identity)).hexdigest()[:_DIGEST_DIGITS]
        return cls(step, attempt, kind, digest)

    @property
    def manifest(self) -> str:
        """Name of the manifest in the run."""
        return export_manifest(self.step, self.attempt, self.kind, self.digest)

    @property
    def folder(self) -> str:
        """Folder of all tries, in the run."""
        return self.manifest.removesuffix(".json")

    def try_folder(self, name: str) -> str:
        """Folder of one try, in the run."""
        return export_dir(self.step, self.attempt, self.kind, self.digest, name)


def find_export(objects: ObjectStore, key: ExportKey) -> ExportManifest | None:
    """The published export of that key, or None.

    Raises:
        UnsupportedFormatError, CorruptionError: its manifest can't be read.
    """
    found = read_record(objects, key.manifest, ExportManifest)
    return None if found is None else found[0]


def published_exports(
    objects: ObjectStore, step: int, attempt: int, kind: str
) -> list[ExportManifest]:
    """The published exports of a step of one kind.

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
    """The published exports of a run, of its highest steps first; whether there are more.

    Args:
        objects: of the run.
        most: at most so many are told, and folders of no more steps are looked into.

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
    found = read_records(objects, names[:most], ExportManifest.parse)
    return [found[name] for name in names[:most] if name in found], len(names) > most


def publish_export(
    objects: ObjectStore, key: ExportKey, manifest: ExportManifest
) -> ExportManifest:
    """Make a try the one that counts, unless another was faster; the one that counts."""
    try:
        return write_record(objects, key.manifest, manifest, generation=None)[0]
    except PreconditionFailedError:
        winner = find_export(objects, key)
        if winner is None:  # published and deleted again in between
            raise
        objects.sync(key.manifest)
        return winner


def withdraw_export(objects: ObjectStore, key: ExportKey, manifest: ExportManifest) -> None:
    """Make `manifest` count no more, if it still is the one that does; its files stay."""
    found = read_record(objects, key.manifest, ExportManifest)
    if found is None or found[0] != manifest:
        return
    with contextlib.suppress(PreconditionFailedError):  # another was published in between
        objects.delete_if(key.manifest, generation=found[1])


def left_record(key: ExportKey, folder: str) -> str:
    """Name of the record, in the run, of what the try `folder` has left."""
    return f"{key.try_folder(folder)}.json"


def leave_try(objects: ObjectStore, key: ExportKey, folder: str, left: LeftTry) -> None:
    """Leave the whole files of a try to the next one, and write it no more.

    Raises:
        StoreFullError: no space or quota left even for the record.
    """
    put_record(objects, left_record(key, folder), left)


def left_tries(objects: ObjectStore, key: ExportKey) -> dict[str, LeftTry]:
    """What tries have left, by their folders, the latest first; without what can't be read."""
    found: dict[str, LeftTry] = {}
    for name in objects.children(key.folder):
        if name.endswith(".json"):
            with contextlib.suppress(*UNREADABLE):  # damaged: its files are written anew
                read = read_record(objects, name, LeftTry)
                if read is not None:
                    folder = name.removeprefix(f"{key.folder}/").removesuffix(".json")
                    found[folder] = read[0]
    return dict(sorted(found.items(), key=lambda one: from_rfc3339(one[1].at), reverse=True))


def delete_left(run: StoreURI, key: ExportKey) -> None:
    """Remove what tries have left, except of the one that counts."""
    for entry in open_files(run).list(key.folder):
        if entry.name.endswith(".json"):  # also one that can't be read
            delete_tries(run, key, entry.name.removesuffix(".json"))


def delete_tries(run: StoreURI, key: ExportKey, prefix: str, *, keep_left: bool = False) -> None:
    """Remove the tries whose names start with `prefix`, except the one that counts.

    One that is published while it goes is withdrawn: else an export would count without its files.

    Args:
        run: where.
        key: of the export.
        prefix: "": all.
        keep_left: of those that were left to the next one, keep the files that are whole.
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
            for one in files.walk(f"{key.folder}/{folder}"):
                if one.name not in whole:
                    files.delete_tree(f"{key.folder}/{folder}/{one.name}")
    now = find_export(objects, key) if removed else None
    if now is not None and now.folder in removed:
        withdraw_export(objects, key, now)
