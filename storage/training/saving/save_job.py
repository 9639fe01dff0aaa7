"""The background half of a save: from Orbax's commit to a durable step. Imports JAX.

    Orbax commits -> sync -> list -> assets, labels -> fence -> manifest -> durable

Until the manifest is written nothing lists the step; whatever fails before leaves it unlisted.
"""

import contextlib
import os
import platform
import shutil
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import jax

from cairn.storage.arrays import FILE_PREFIX, ChunkDigests, StoredFile
from cairn.storage.errors import FencedError, SaveError, StorageError, translate
from cairn.storage.runs import (
    COMMIT_FILE,
    Manifest,
    ObjectRecord,
    Writer,
    put_assets,
    step_dir,
    sync_folder,
)
from cairn.storage.store import (
    Clock,
    ObjectStore,
    StoreURI,
    open_files,
    read_files,
    rfc3339,
    within,
)
from cairn.storage.training import processes
from cairn.storage.training.saving.engine import TEMPORARY, StepWrite
from cairn.storage.training.saving.file_origins import FileOrigins
from cairn.storage.training.saving.item_writer import WrittenItem
from cairn.storage.training.saving.save_handle import SaveHandle
from cairn.storage.training.saving.saves import HeldItems, Save, leaf_records

__all__ = ["SaveJob", "failure", "job_environment", "outcome_key"]

_PACKAGES: Final = (
    *("cairn-checkpoints", "jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy"),
)

_REMOVAL_SECONDS: Final = 10.0
"""How long to try to remove what a failed save has left."""


@dataclass(frozen=True)
class SaveJob:
    """One save, its arrays held.

    Attributes:
        handle: what the caller waits on.
        save: what is stored.
        items: the trees, by name.
        write: writes the step.
        objects: the run's objects.
        writer: holds the attempt that this writes in.
        clock: tells the time.
        by: id of the writer.
        origins: of the files of the step before.
    """

    handle: SaveHandle
    save: Save
    items: HeldItems
    write: StepWrite
    objects: ObjectStore
    writer: Writer
    clock: Clock
    by: str
    origins: FileOrigins

    def run(self) -> None:
        """Write the step, publish it, and finish the handle with what came of it."""
        handle, error = self.handle, None
        key = outcome_key(handle)
        written: Mapping[str, WrittenItem] | None = None
        try:
            self.items.describe()
            written = processes.wait_for(self.write.result, key)
            if processes.is_primary():
                self._publish(written)
        except BaseException as exc:
            error = failure(exc, handle.uri)
            _let_go(exc)
            if written is None:
                processes.report_failure(key, error)
        try:
            if processes.is_primary() or error is None:
                processes.share_outcome(key, error)
        except BaseException as exc:
            error = error or failure(exc, handle.uri)
        if error is None and written is not None:
            for name, item in written.items():
                self.items[name].durable(item, handle.uri / name)
        else:
            self.writer.drop()
            if written is None:
                _remove_leftovers(self.objects, handle, self.write)
            else:
                for held in self.items.values():
                    held.unchanged.forget()
        handle.finish(error)

    def _publish(self, written: Mapping[str, WrittenItem]) -> None:
        step, attempt = self.handle.step, self.handle.attempt
        sync_folder(self.handle.uri)
        objects = self._objects(written)
        names = [record.name for record in objects]
        manifest = Manifest(
            step=step,
            attempt=attempt,
            created=rfc3339(self.clock()),
            writer=self.by,
            items=self.save.names,
            leaves=leaf_records(self.items.leaves, self._digests(written), path=self.handle.uri),
            objects=objects,
            assets=put_assets(self.objects, self.save.assets),
            model=self.save.model,
            environment=job_environment() | Manifest.sharing(self.origins.shared(names)),
        )
        self.writer.publish(manifest, self.save.annotation)
        self.origins.remember(names, step=step, attempt=attempt)

    def _objects(self, written: Mapping[str, WrittenItem]) -> tuple[ObjectRecord, ...]:
        """The files of the step, all those that this process wrote among them.

        Raises:
            SaveError: some are gone, or are not what was written: somebody else was in the folder.
        """
        expected = {
            f"{name}/{file.name}": file for name, item in written.items() for file in item.files
        }
        listed = list_objects(
            self.handle.uri,
            known={name: file.crc32c for name, file in expected.items()},
            contents={name: file.content for name, file in expected.items()},
        )
        found = {record.name: record for record in listed}
        problems = [
            f"{name}: expected {file.size} bytes, crc32c {file.crc32c}, found "
            + ("none" if found.get(name) is None else f"{found[name]}")
            for name, file in expected.items()
            if not _is_as_written(found.get(name), file)
        ]
        if COMMIT_FILE not in found:
            problems.append(f"{COMMIT_FILE}: missing")
        if problems:
            raise SaveError(
                "files of the step are not what was written",
                path=self.handle.uri,
                expected="every file that was written, and Orbax's commit",
                found=f"{len(problems)} that are not",
                next_step="Find out who else writes there and save again; the step is not listed.",
                problems=problems,
            )
        return listed

    def _digests(self, written: Mapping[str, WrittenItem]) -> dict[str, ChunkDigests]:
        """Of all chunks, by item: this process's, and what the others wrote down of theirs."""
        found = {name: ChunkDigests() for name in self.items}
        for name, item in written.items():
            digests = item.digests
            others = [
                f"{name}/{FILE_PREFIX}{process}.json"
                for process in range(jax.process_count())
                if process != jax.process_index()
            ]
            for file, value in ObjectStore.open(self.handle.uri).read_many(others).items():
                if value is not None:  # leaves that are missing then are named
                    path = self.handle.uri / file
                    digests = digests.merged(ChunkDigests.parse(value.value, path=path))
            found[name] = digests
        return found


def _is_as_written(found: ObjectRecord | None, written: StoredFile) -> bool:
    return found is not None and (found.size, found.crc32c) == (written.size, written.crc32c)


def _let_go(error: BaseException | None) -> None:
    """Forget what the frames of a failure hold: among it arrays, for as long as it is known."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def outcome_key(handle: SaveHandle) -> str:
    """Under what the processes of a job tell each other how a save went; each is used once."""
    return processes.save_key(handle.uri)


def _remove_leftovers(objects: ObjectStore, handle: SaveHandle, write: StepWrite) -> None:
    """Make room after a save that Orbax did not commit: nobody will read what it wrote.

    Only what this save made: somebody else's files may lie where it was to write, or have come to
    lie there since. With several processes the others may still be writing: what is left then is
    for `cairn gc`.
    """
    if jax.process_count() > 1 or not write.begun or write.given_up:
        return
    folder = handle.uri
    try:
        if folder.scheme != "file":
            with within(_REMOVAL_SECONDS):  # the store may be what failed
                objects.delete_prefix(f"{step_dir(handle.attempt, handle.step)}/")
            return
        parent = folder.parent.local_path
        for name in os.listdir(parent):
            if name.startswith(f"{folder.name}{TEMPORARY}") or (
                name == folder.name and write.committed
            ):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
    except (OSError, StorageError):
        return  # the save has failed already, and that is what the caller is told


def failure(exc: BaseException, path: object) -> StorageError:
    """What a failed save raises: a SaveError, or the FencedError that it was."""
    known = translate(exc, path=path)
    if not isinstance(known, SaveError | FencedError):
        known = SaveError(
            "the save failed",
            path=path,
            expected="a durable step",
            found=str(known),
            next_step="What was stored before is untouched; mend the cause and save again.",
        )
    if known is not exc:
        known.__cause__ = exc
    return known


def job_environment() -> dict[str, Any]:
    """Versions, host and devices of this job, for people who ask later where a step came from."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "packages": versions,
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
    }


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
