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
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import jax

from cairn.state.checkpointing.gc_pause import pause_gc
from cairn.state.checkpointing.processes import background, exchange
from cairn.state.checkpointing.save_handle import SaveHandle
from cairn.state.checkpointing.saves import listeners
from cairn.state.checkpointing.saves.dedup import DedupSources, WrittenTree
from cairn.state.checkpointing.saves.engine import TEMPORARY, StepWrite, commit_text
from cairn.state.checkpointing.saves.file_check import check_files
from cairn.state.checkpointing.saves.host_trees import HostTrees
from cairn.state.checkpointing.saves.leaf_records import with_digests
from cairn.state.checkpointing.saves.preparation import Save
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
"""Maximum seconds to spend on removing a failed save's files from an object store."""


@dataclass(frozen=True)
class SaveJob:
    """Background work of a save whose arrays are staged.

    Attributes:
        handle: handle of the save, for the caller.
        save: content of the save without arrays.
        items: the trees, by name.
        write: the write of the step.
        objects: the run's small objects.
        writer: the run's writer, which has the attempt to write in.
        clock: returns the current time in UTC.
        by: id of the writer.
        dedup_sources: the steps that wrote the data files of the previous step.
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
            # Processes that wait in `result` need this report. Those that have returned from it
            # wait in `share_outcome`.
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
                # A linked file may have caused the failure: the next save links none.
                for item in self.items.values():
                    item.dedup.forget()
        handle.finish(error)
        if error is None and exchange.is_primary():
            listeners.publish(str(self.objects.uri), handle.step, handle.attempt)

    def _publish(self, written: Mapping[str, WrittenTree]) -> None:
        step, attempt, folder = self.handle.step, self.handle.attempt, self.handle.uri
        # Sync first: the manifest must never be durable before the data that it lists.
        sync_folder(folder)
        files = [*self.write.files]
        for item, tree in written.items():
            for record in tree.records:
                files += [file._replace(name=f"{item}/{file.name}") for file in record.files]
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
        # The index is written before the manifest: a crash in between leaves the step unlisted.
        self.writer.publish(
            indexed, self.save.annotation, before=lambda: self.objects.write(name, data)
        )
        self.dedup_sources.remember(names, step=step, attempt=attempt)


def _shards_of(written: Mapping[str, WrittenTree]) -> dict[tuple[str, str], list[PlacedShard]]:
    """Return all leaves' shards, by (item, path), with file names relative to the step's folder."""
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
    """Remove the files of a save that failed, to free their space.

    Only files that this save wrote are removed: other programs may have files in the same folder.
    In a job of several processes nothing is removed, as others may still write; `cairn gc` removes
    these files later.
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
    """Return the error that a failed save raises: a SaveError about `exc`, or a FencedError.

    If `exc` is a SaveError or a FencedError, it is returned itself.
    """
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
    """Return versions, host and devices of this job, for the record of where a step was saved."""
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
    """Return the versions of `_PACKAGES`; cached, as each query takes a millisecond."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
