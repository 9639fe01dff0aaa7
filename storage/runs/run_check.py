"""Check of a run's records: each is what was written, and they agree. Reads no arrays.

Every record is read, and its place and checksum are checked. Then records are compared: attempts
with the attempts before them, the lease with the attempts and the durable step that it names,
aliases and exports with manifests, manifests with their folders and assets.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from cairn.storage.errors import CorruptionError, StorageError
from cairn.storage.runs.history import History, StepKey
from cairn.storage.runs.lease import Lease
from cairn.storage.runs.records.aliases import Alias
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.assets import read_asset
from cairn.storage.runs.records.exports import ExportManifest
from cairn.storage.runs.records.layout import (
    ALIASES,
    ANNOTATIONS,
    ATTEMPTS,
    COMMIT_FILE,
    EXPORTS,
    LEASE_FILE,
    RUN_FILE,
    TRASH,
    asset_file,
    manifest_file,
    parse_alias_file,
    parse_annotation_file,
    parse_attempt_file,
    parse_export_manifest,
    parse_hold_file,
    parse_intent_file,
    parse_trash_file,
    step_dir,
    trash_file,
)
from cairn.storage.runs.records.manifest import AssetRecord, Manifest, PlainStep
from cairn.storage.runs.records.placed import UNREADABLE, judge_records, parse_record, read_run_info
from cairn.storage.runs.records.run_info import RunInfo
from cairn.storage.runs.run import Run, refuse_lost_run_record
from cairn.storage.runs.step_files import removed_by_owner
from cairn.storage.runs.step_states import StepState
from cairn.storage.runs.trash import Hold, Intent, Tombstone
from cairn.storage.store.disk.confinement import source_folder
from cairn.storage.store.objects import Versioned
from cairn.storage.store.open_files import open_files
from cairn.storage.store.records import Record, RecordLocation, sha256_of, stored_location

__all__ = ["RunReport", "check_run", "run_ids"]

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class RunReport:
    """Result of checking the records of a run.

    Attributes:
        records: number of records that were read.
        problems: a line for each record that is not as it was written, or contradicts another; it
            begins with the name of a record.
        unreadable: names of the records that can't be read, are lost or are of another place; also
            the lease's if it is older than the newest attempt.
        unlisted: folders of steps that Orbax has committed, without a manifest. A save that was
            killed at its end leaves one, and so does a manifest that was lost.
    """

    records: int
    problems: tuple[str, ...]
    unreadable: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems


def check_run(run: Run) -> RunReport:
    """Read every record of a run, compare them with one another, and return the report.

    Raises:
        StoreUnavailableError: the store gives no answer.
    """
    with contextlib.suppress(StorageError):  # reported below
        read_run_info(run.objects)  # refreshes the cached id: this process may know an earlier run
    check = _RunCheck(run)
    if not check.run_file():
        return check.report()  # with the run.json of another run, every record would seem misplaced
    check.history()
    check.manifests()
    check.aliases()
    check.trash()
    check.annotations()
    check.exports()
    return check.report()


def run_ids(run: Run) -> Counter[str]:
    """Return run id -> number of the run's records, besides `run.json`, that name it."""
    objects = run.objects
    names = [name for name in objects.children(ATTEMPTS) if parse_attempt_file(name) is not None]
    names += [manifest_file(*key) for key in run.published()]
    names += [name for name in objects.list(ALIASES) if parse_alias_file(name)]
    names.append(LEASE_FILE)
    counts: Counter[str] = Counter()
    for _, stored in objects.read_each(names):
        place = None if stored is None else stored_location(stored.value)
        if place is not None and place.run is not None:
            counts[place.run] += 1
    return counts


class _RunCheck:
    """Check that is running."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._objects = run.objects
        self._history: History = run.history()
        self._manifests: dict[StepKey, str] = {}
        self._problems: dict[str, list[str]] = {}
        self._unreadable: set[str] = set()
        self._records = 0

    def report(self) -> RunReport:
        """Return the report."""
        lines = [
            f"{name}: {text}" for name, all_ in sorted(self._problems.items()) for text in all_
        ]
        unlisted = [
            step_dir(info.attempt, info.step)
            for info in self._run.unpublished()
            if info.state in (StepState.UNVERIFIED, StepState.SUPERSEDED)
        ]
        unreadable = tuple(sorted(self._unreadable))
        return RunReport(self._records, tuple(lines), unreadable, tuple(unlisted))

    def run_file(self) -> bool:
        """Check `run.json`; return False if it is the record of another run."""
        stored = self._objects.read(RUN_FILE)
        try:
            if stored is None:
                refuse_lost_run_record(self._run)
                return True
            info = RunInfo.parse(
                stored.value, self._run.uri / RUN_FILE, RecordLocation(None, RUN_FILE)
            )
            self._records += 1
        except StorageError as exc:
            self._add(RUN_FILE, exc)
            return True
        if self._history.attempts.known or not self._history.attempts.unknown:
            return True
        ids = run_ids(self._run)
        if info.id in ids or not ids:
            return True
        error = CorruptionError(
            "the run of another place",
            path=self._run.uri / RUN_FILE,
            expected=f"the id {', '.join(map(repr, ids))} that {ids.total()} other records have",
            found=repr(info.id),
            next_step="Restore it from a backup, or see what `cairn repair` can do.",
        )
        self._add(RUN_FILE, error)
        return False

    def history(self) -> None:
        """Check attempts and the lease, and compare them with one another and with steps."""
        history = self._history
        for name, error in history.problems.items():
            self._add(name, error)
        self._records += len(history.attempts.known)
        lease = self._read([LEASE_FILE], Lease).get(LEASE_FILE)
        if lease is None:
            if history.attempts.known and LEASE_FILE not in history.problems:
                self._say(LEASE_FILE, "none, though attempts were begun")
                self._unreadable.add(LEASE_FILE)
            return
        newest = history.attempts.known[-1:]
        if newest and lease.attempt < newest[0].number:
            self._say(LEASE_FILE, f"attempt {lease.attempt}, the newest is {newest[0].number}")
            self._unreadable.add(LEASE_FILE)

    def manifests(self) -> None:
        """Check every manifest, with its attempt, its folder and its assets."""
        numbers = {attempt.number for attempt in self._history.attempts.known}
        numbers.update(self._history.attempts.unknown)
        published = self._history.published
        markers = {key: f"{step_dir(key[1], key[0])}/{COMMIT_FILE}" for key in published}
        committed = self._objects.existing(markers.values())
        assets: dict[str, tuple[str, AssetRecord]] = {}
        names = {manifest_file(*key): key for key in published}
        for name, value in self._objects.read_each(names):
            step, attempt = key = names[name]
            manifest = None
            if value is not None:
                self._manifests[key] = sha256_of(value.value)
                manifest = self._manifest(name, value)
                for asset in () if manifest is None else manifest.assets:
                    assets[asset.sha256] = name, asset
            if attempt not in numbers:
                self._say(name, f"of attempt {attempt}, which has no record")
            if key in self._history.deleted:
                continue
            if manifest is not None and manifest.plain is not None:
                self._adopted(name, manifest.plain)
            elif markers[key] not in committed:
                self._say(name, f"its folder has no {COMMIT_FILE}: {step_dir(attempt, step)}")
        for sha256, (name, asset) in assets.items():
            try:
                read_asset(self._objects, asset)
            except StorageError as exc:
                self._say(asset_file(sha256), f"which {name} names: {exc}")

    def _manifest(self, name: str, stored: Versioned) -> Manifest | None:
        """Return a parsed manifest; None if it can't be read, which is noted as a problem."""
        try:
            manifest = parse_record(self._objects, name, Manifest, stored)
        except UNREADABLE as exc:
            self._add(name, exc)
            return None
        self._records += 1
        return manifest

    def _adopted(self, name: str, plain: PlainStep) -> None:
        """Check the folder of an imported step, which may lack a commit marker."""
        if plain.source is None:
            return
        try:
            folder = source_folder(self._objects.uri, plain.source)
        except StorageError as exc:
            self._say(name, str(exc))
            return
        if not open_files(folder).list():
            self._say(name, str(removed_by_owner(folder)))

    def aliases(self) -> None:
        """Check every alias, and the manifest that it points to."""
        names = [name for name in self._objects.list(ALIASES) if parse_alias_file(name)]
        for name, alias in self._read(names, Alias).items():
            if alias.deleted:
                continue
            key = alias.step, alias.attempt
            digest = self._manifests.get(key)
            if digest is None:
                self._say(name, f"points to {manifest_file(*key)}, which is not there")
            elif alias.manifest_digest not in (None, digest):
                self._say(name, f"points to another {manifest_file(*key)} than is there")
            elif key in self._history.deleted:
                self._say(name, f"points to a step that is deleted: {trash_file(*key)}")

    def trash(self) -> None:
        """Check tombstones, intents and holds."""
        names = self._objects.list(TRASH)
        tombstones = [name for name in names if parse_trash_file(name)]
        for name, tombstone in self._read(tombstones, Tombstone).items():
            key = parse_trash_file(name)
            if key not in self._manifests and not tombstone.removing:
                self._say(name, "of a step that has no manifest")
        self._read([name for name in names if parse_intent_file(name)], Intent)
        self._read([name for name in names if parse_hold_file(name)], Hold)

    def annotations(self) -> None:
        """Check labels and metrics."""
        names = self._objects.list(ANNOTATIONS)
        self._read([name for name in names if parse_annotation_file(name)], Annotation)

    def exports(self) -> None:
        """Check manifests of exports, the steps from which they were made, and their files."""
        files = self._run.files
        for folder in files.list(EXPORTS):
            names = [
                f"{EXPORTS}{folder.name}/{entry.name}"
                for entry in (files.list(f"{EXPORTS}{folder.name}") if folder.is_dir else ())
            ]
            manifests = [name for name in names if parse_export_manifest(name)]
            for name, export in self._read(manifests, ExportManifest).items():
                self._check_export(name, export)

    def _check_export(self, name: str, export: ExportManifest) -> None:
        source = self._manifests.get((export.step, export.attempt))
        if source is not None and source != export.source:
            self._say(name, f"made of another {manifest_file(export.step, export.attempt)}")
        key = export.key
        if key.manifest != name:
            self._say(name, f"what it says belongs to {key.manifest}")
            return
        folder = key.try_folder(export.folder)
        present = {entry.name: entry.size for entry in self._run.files.walk(folder)}
        for file in export.files:
            if present.get(file.name) != file.size:
                size = present.get(file.name, "none")
                self._say(name, f"{folder}/{file.name} has {file.size} bytes, found {size}")

    def _read(self, names: Iterable[str], kind: type[R]) -> dict[str, R]:
        records, unreadable = judge_records(self._objects, names, kind.parse)
        self._records += len(records)
        for name, error in unreadable.items():
            self._add(name, error)
        return records

    def _add(self, name: str, error: StorageError) -> None:
        self._unreadable.add(name)
        self._say(name, str(error))

    def _say(self, name: str, text: str) -> None:
        lines = self._problems.setdefault(name, [])
        if text not in lines:
            lines.append(text)
