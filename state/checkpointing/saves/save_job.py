"""The background half of a save: from Orbax's commit to a durable step. Imports JAX.

    Orbax commits -> sync -> compare -> assets -> index -> fence -> manifest -> durable

The manifest makes the step listed; any failure before that leaves it unlisted.
"""

import contextlib
import functools
import os
import platform
import shutil
import socket
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import jax

from cairn.state.checkpointing.gc_pause import pause_gc
from cairn.state.checkpointing.processes import background, exchange
from cairn.state.checkpointing.saves import listeners
from cairn.state.checkpointing.saves.dedup import DedupSources, WrittenTree
from cairn.state.checkpointing.saves.engine import TEMPORARY, StepWrite, commit_text
from cairn.state.checkpointing.saves.file_check import check_files
from cairn.state.checkpointing.saves.host_trees import HostTrees
from cairn.state.checkpointing.saves.leaf_records import with_digests
from cairn.state.checkpointing.saves.preparation import Save
from cairn.state.checkpointing.saves.save_handle import SaveHandle
from cairn.storage.arrays.data_files import StoredFile
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.errors import FencedError, SaveError, StorageError, translate_error
from cairn.storage.runs.records.assets import put_assets
from cairn.storage.runs.records.index_writer import PlacedShard, make_index
from cairn.storage.runs.records.layout import INDEX_FILE, step_dir
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.records.placed import place_of
from cairn.storage.runs.writer import Writer, sync_folder
from cairn.storage.store.clock import Clock, rfc3339
from cairn.storage.store.deadlines import deadline_after
from cairn.storage.store.objects import ObjectStore

__all__ = ["SaveJob", "failure", "job_environment"]

_PACKAGES: Final = (
    *("cairn-checkpoints", "jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy"),
)

_REMOVAL_SECONDS: Final = 10.0
"""Seconds to try to remove a failed save's files."""


@dataclass(frozen=True)
class SaveJob:
    """Save whose arrays are staged.

    Attributes:
        handle: what the caller waits on.
        save: what is stored.
        items: the trees, by name.
        write: writes the step.
        objects: the run's objects.
        writer: holds the attempt that this writes in.
        clock: returns the current time in UTC.
        by: id of the writer.
        dedup_sources: of the files of the previous step.
    """

    handle: SaveHandle
    save: Save
    items: HostTrees
    write: StepWrite
    objects: ObjectStore
    writer: Writer
    clock: Clock
    by: str
    dedup_sources: DedupSources

    def run(self) -> None:
        """Write the step, publish it, and finish the handle with the outcome."""
        handle, error = self.handle, None
        key = self.write.key
        written: Mapping[str, WrittenTree] | None = None
        try:
            with pause_gc():
                self.items.describe()
            written = background.wait_for(self.write.result, key)
            if exchange.is_primary():
                with pause_gc():
                    self._publish(written)
        except BaseException as exc:
            error = failure(exc, handle.uri)
            self.items.end(error)
            _let_go(exc)
            # Others may still wait in `result`; after it they wait in `share_outcome` instead.
            if written is None:
                background.report_failure(key, error)
        try:
            if exchange.is_primary() or error is None:
                background.share_outcome(key, error)
        except BaseException as exc:
            error = error or failure(exc, handle.uri)
        if error is None and written is not None:
            for name, tree in written.items():
                self.items[name].remember(tree, handle.uri / name, (handle.step, handle.attempt))
        else:
            self.writer.drop()
            if written is None:
                _remove_leftovers(self.objects, handle, self.write)
            else:
                # The failure may be due to a file that was linked: write all anew next time.
                for item in self.items.values():
                    item.dedup.forget()
        handle.finish(error)
        if error is None and exchange.is_primary():
            listeners.publish(str(self.objects.uri), handle.step, handle.attempt)

    def _publish(self, written: Mapping[str, WrittenTree]) -> None:
        step, attempt, folder = self.handle.step, self.handle.attempt, self.handle.uri
        # Sync first: the manifest must never be durable before the data that it lists.
        sync_folder(folder)
        files = [*self.write.files, *_files_of(written)]
        objects = check_files(
            folder, {file.name: file for file in files}, marker=commit_text(folder)
        )
        names = [record.name for record in objects]
        shards = _shards_of(written)
        manifest = Manifest(
            step=step,
            attempt=attempt,
            created=rfc3339(self.clock()),
            writer=self.by,
            items=self.save.names,
            iterators=dict.fromkeys(self.save.iterators, jax.process_count()),
            assets=put_assets(self.objects, self.save.assets),
            model=self.save.model,
            environment=job_environment(),
        )
        name = f"{step_dir(attempt, step)}/{INDEX_FILE}"
        data, indexed = make_index(
            manifest,
            place_of(self.objects, name),
            leaves=with_digests(self.items.records, shards),
            forms={name: item.forms for name, item in self.items.items() if item.forms},
            meta_digest=self.write.meta_digest,
            shards=shards,
            objects=objects,
            origins=self.dedup_sources.of(names),
        )
        # The index before the manifest: a crash in between leaves the step unlisted.
        self.writer.publish(
            indexed, self.save.annotation, before=lambda: self.objects.write(name, data)
        )
        self.dedup_sources.remember(names, step=step, attempt=attempt)


def _files_of(written: Mapping[str, WrittenTree]) -> Iterator[StoredFile]:
    """Yield the files of all items, named from the step's folder."""
    for name, tree in written.items():
        for record in tree.records:
            for file in record.files:
                yield file._replace(name=f"{name}/{file.name}")


def _shards_of(written: Mapping[str, WrittenTree]) -> dict[tuple[str, str], list[PlacedShard]]:
    """Return the shards of all leaves, by item and path; files named from the step's folder."""
    placed: dict[tuple[str, str], list[PlacedShard]] = {}
    for name, tree in written.items():
        for record in tree.records:
            files: dict[str, str] = {}
            for path, (file, offset, length), origin, digests, _ in record.shards.values():
                within = files.get(file)
                if within is None:
                    within = files[file] = f"{name}/{file}"
                shard = PlacedShard(origin, ValueRef(within, offset, length), digests)
                placed.setdefault((name, path), []).append(shard)
    return placed


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error's tracebacks, which would keep arrays in memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _remove_leftovers(objects: ObjectStore, handle: SaveHandle, write: StepWrite) -> None:
    """Free the space of a save that Orbax did not commit, which nobody will read.

    Removes only what this save wrote: others may have files in the same place, or may have put them
    there since. With several processes the others may still be writing: `cairn gc` removes those
    leftovers.
    """
    if jax.process_count() > 1 or not write.begun or write.given_up:
        return
    folder = handle.uri
    try:
        if folder.scheme != "file":
            with deadline_after(_REMOVAL_SECONDS):  # the store may be what failed
                objects.delete_prefix(f"{step_dir(handle.attempt, handle.step)}/")
            return
        parent = folder.parent.local_path
        for name in os.listdir(parent):
            if name.startswith(f"{folder.name}{TEMPORARY}") or (
                name == folder.name and write.committed
            ):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
    except (OSError, StorageError):
        return  # the caller gets the save's own error


def failure(exc: BaseException, path: object) -> StorageError:
    """Convert an error to what a failed save raises: a SaveError, or the FencedError itself."""
    error = translate_error(exc, path=path)
    if not isinstance(error, SaveError | FencedError):
        error = SaveError(
            "the save failed",
            path=path,
            expected="a durable step",
            found=str(error),
            next_step="What was stored before is untouched; mend the cause and save again.",
        )
    if error is not exc:
        error.__cause__ = exc
    return error


def job_environment() -> dict[str, Any]:
    """Return versions, host and devices of this job, which tell later where a step came from."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "packages": dict(_versions()),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
    }


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions of installed packages, cached: each look-up takes a millisecond."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
