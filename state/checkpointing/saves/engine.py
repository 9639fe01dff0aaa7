"""Write of a step: Orbax opens and commits the step, Cairn writes its items in between.

All calls that a save makes to Orbax are here; they use its public API. To Orbax, the whole step is
one `StatefulCheckpointable`: Orbax creates the folder, calls `StepWrite.save`, and commits. Imports
JAX and Orbax.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Final, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from cairn.state.checkpointing import exit_guard
from cairn.state.checkpointing.gc_pause import pause_gc
from cairn.state.checkpointing.iterators import IteratorState
from cairn.state.checkpointing.processes import background, exchange
from cairn.state.checkpointing.saves.dedup import WrittenTree
from cairn.state.checkpointing.saves.process_records import (
    ProcessRecord,
    read_records,
    record_file,
    records_to_bytes,
    remove_records,
)
from cairn.state.checkpointing.saves.s3_paths import register_s3_paths
from cairn.state.checkpointing.saves.tree_writer import (
    HostTree,
    complete_tree,
    write_files,
    write_tree,
)
from cairn.storage.arrays.data_files import StoredFile, stored_file
from cairn.storage.arrays.orbax_tree import CUSTOM_KEY, JSON_FILES, META_ITEM, STEP_METADATA
from cairn.storage.errors import (
    InvalidURIError,
    SaveError,
    StoreUnavailableError,
    UnsupportedFormatError,
)
from cairn.storage.runs.records.layout import COMMIT_FILE, iterator_file
from cairn.storage.store.deadlines import Progress, WatchedCall
from cairn.storage.store.gcs import set_etils_timeouts
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.records import canonical_json, sha256_of
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["TEMPORARY", "StepWrite", "begin_step", "commit_text", "orbax_folder"]

_TIMEOUT_SECONDS: Final = 3600
"""Seconds after which Orbax gives up a save. Cairn's own deadlines come long before."""

_ENDING_SECONDS: Final = 10.0
"""Seconds that Orbax may take to end after the write of the items has failed."""

R = TypeVar("R")

TEMPORARY: Final = ".orbax-checkpoint-tmp"
"""Suffix that Orbax appends to the name of a step's folder until the step is complete."""


def orbax_folder(uri: StoreURI) -> str:
    """Return a folder's address in the form that Orbax accepts.

    Raises:
        InvalidURIError: the folder is neither on a local disk nor in a bucket; Orbax would write
            to a wrong place.
    """
    if uri.scheme not in ("file", "gs", "s3"):
        raise InvalidURIError(
            "no arrays can be stored here",
            path=uri,
            expected="a file://, gs:// or s3:// URI",
            found=f"{uri.scheme}://",
            next_step="Save to a local disk or to a bucket.",
        )
    return uri.orbax_path()


class StepWrite:
    """Write of a step. To Orbax it is a `StatefulCheckpointable` that can only save.

    Attributes:
        key: key of the job's messages about this save, see `background.save_key`.
        begun: True once this write may have created files in the folder.
        committed: True once Orbax has committed the step.
        given_up: True once this write stopped waiting for Orbax, because the store did not respond
            in time. Orbax may then still write files, but the step will not be listed.
    """

    def __init__(
        self,
        folder: StoreURI,
        items: Mapping[str, HostTree],
        meta: Mapping[str, Any],
        iterators: Mapping[str, IteratorState],
        key: str,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Prepare the write of a new step; `begin` or `result` starts it.

        Args:
            folder: folder of the step, which must not exist.
            items: the step's trees, by name.
            meta: content of the step's JSON item.
            iterators: states of this process's iterators, by name.
            key: key of the job's messages about this save, see `background.save_key`.
            check: function that is called while items are written; if it raises, the step is not
                committed.
        """
        self.key = key
        self._check = check
        self._folder = folder
        self._items = items
        self._meta = meta
        self._iterators = iterators
        self._written: dict[str, WrittenTree] = {}
        self._response: ocp.AsyncResponse[None] | None = None
        self._progress = Progress()
        self._failure: Exception | None = None
        self._files: list[StoredFile] = []
        self.begun = self.committed = self.given_up = False

    def begin(self) -> None:
        """Start Orbax's save; all processes must call this.

        With several processes this waits for the others and uses devices: all processes must call
        it at the same point of their device computations.

        Raises:
            SaveError: the step's folder exists already; nothing was written.
            StoreUnavailableError: the store does not respond.
        """
        if exchange.is_primary():
            _refuse_taken(self._folder)
        self.begun = True
        # Orbax's start uses the devices of all processes, and would wait forever for a failed one.
        background.meet(self.key, "start")
        self._response = self._watched(self._open)

    def result(self) -> Mapping[str, WrittenTree]:
        """Wait for Orbax's commit; return what this process wrote, by item.

        Calls `begin` if no one has. When this returns or raises, this process writes no items any
        more.

        Raises:
            Exception: writing the items failed, or Orbax did.
        """
        if self._response is None:
            self.begin()
        assert self._response is not None
        self._watched(self._response.result)
        self.committed = True
        if exchange.is_primary():
            self._record_readers()
        return self._written

    def _open(self) -> ocp.AsyncResponse[None]:
        if self._folder.scheme == "gs":
            set_etils_timeouts()
        if self._folder.scheme == "s3":
            register_s3_paths()
        with _context(self._folder):
            return ocp.save_checkpointables_async(
                orbax_folder(self._folder),
                {META_ITEM: self},
                custom_metadata={CUSTOM_KEY: self._custom},
            )

    def _watched(self, call: Callable[[], R]) -> R:
        """Run a call of Orbax and return its result; for remote stores, with a deadline.

        Raises:
            StoreUnavailableError: the call made no progress in time.
            Exception: writing the items failed, or Orbax did.
        """
        if self._folder.scheme == "file":
            return call()
        self._progress.record_answer()
        watched = WatchedCall(call, path=self._folder)
        try:
            return watched.result(self._progress)
        except StoreUnavailableError:
            self.given_up = watched.is_running
            exit_guard.outlast(lambda: watched.is_running)
            if self._failure is not None:
                raise self._failure from None
            raise

    @property
    def files(self) -> list[StoredFile]:
        """Files of the step outside of the items' trees, as process 0 knows them.

        Their names are relative to the step's folder. Files that Orbax writes, such as its commit
        mark, are not included.
        """
        return list(self._files)

    @cached_property
    def meta_digest(self) -> str:
        """Digest of the JSON item's canonical form."""
        return sha256_of(canonical_json(dict(self._meta)))

    async def save(self, directory: Any) -> Awaitable[None]:
        """Return the coroutine that writes the items once the folder exists. Orbax calls this."""
        return self._save(directory)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Raise an error: the protocol requires this method, but it is never called.

        Orbax's own handlers read steps.

        Raises:
            UnsupportedFormatError: always.
        """
        raise UnsupportedFormatError(
            "this only saves",
            path=directory,
            expected="Orbax's own handlers, which read what is stored",
            found=type(self).__name__,
            next_step="Load without giving an object to load into.",
        )

    async def _save(self, directory: Any) -> None:
        path = await directory.await_creation()  # waits in process 0, which creates the folder
        await asyncio.to_thread(self._write_watched, parse_uri(str(path)).parent)

    def _write_watched(self, folder: StoreURI) -> None:
        try:
            with self._progress.paused():  # `_write`'s own waits have deadlines
                self._write(folder)
        except Exception as exc:
            self._failure = exc
            self._progress.end_within(_ENDING_SECONDS)
            raise

    def _write(self, folder: StoreURI) -> None:
        """Write all items into `folder`; when this returns or raises, no write runs any more."""
        if self.given_up:
            raise SaveError("the save was given up", path=self._folder)
        background.meet(self.key, "made")
        trees = {name: item for name, item in self._items.items() if item.arrays}
        with ThreadPoolExecutor(len(trees) + 2, "cairn-item") as pool:
            checked = pool.submit(self._check) if self._check is not None else None
            beside = pool.submit(self._write_beside, folder)
            writing = {
                name: pool.submit(write_tree, folder / name, item) for name, item in trees.items()
            }
        self._files += beside.result()
        self._written = {name: writer.result() for name, writer in writing.items()}
        if checked is not None and (refusal := checked.exception()) is not None:
            raise SaveError(
                "the save was refused by its check, and nothing is listed",
                path=self._folder,
                found=str(refusal),
                next_step="What was stored before is untouched; mend the cause and save again.",
            ) from refusal
        if jax.process_count() == 1:
            self._complete(folder, [])
            return
        # The other processes share no memory with process 0: they leave records in the store.
        if not exchange.is_primary():
            records = {name: tree.records[0] for name, tree in self._written.items()}
            records[META_ITEM] = ProcessRecord(beside.result(), {})
            name = record_file(int(jax.process_index()))
            write_files(folder, {name: records_to_bytes(records)})
        # After this barrier all records are in the store, and only process 0 still writes.
        background.meet(self.key, "written")
        if not exchange.is_primary():
            return
        others = range(1, jax.process_count())
        with pause_gc(), ThreadPoolExecutor(1, "cairn-parts") as pool:
            records_of_others = read_records(folder, others)
            removed = pool.submit(remove_records, folder, others)
            self._complete(folder, records_of_others)
            removed.result()

    def _complete(self, folder: StoreURI, others: Sequence[Mapping[str, ProcessRecord]]) -> None:
        """Write, on process 0, the index of each item and Orbax's commit markers.

        Args:
            folder: the step's folder.
            others: records of the other processes, by item.
        """
        self._files += [file for records in others for file in records[META_ITEM].files]
        for name, written in self._written.items():
            of_others = [records[name] for records in others]
            self._written[name] = complete_tree(folder / name, written, of_others)
        # Older Orbax APIs want a commit marker in each item on a bucket. On a disk we write them,
        # too: the step may be copied to a bucket.
        items = [*self._written, META_ITEM]
        markers = {f"{item}/{COMMIT_FILE}": commit_text(self._folder / item) for item in items}
        self._files += write_files(folder, markers)

    def _write_beside(self, folder: StoreURI) -> list[StoredFile]:
        """Write the JSON item (process 0 only) and the states of this process's iterators."""
        files = []
        if exchange.is_primary():
            text = json.dumps(self._meta).encode()
            files += write_files(folder, {f"{META_ITEM}/{JSON_FILES[0]}": text})
        if self._iterators:
            files += self._write_positions(folder)
        return files

    def _write_positions(self, folder: StoreURI) -> list[StoredFile]:
        """Write the states of this process's iterators."""
        process, count = int(jax.process_index()), jax.process_count()
        return write_files(
            folder,
            {
                iterator_file(name, process, count): state.data
                for name, state in self._iterators.items()
            },
        )

    @cached_property
    def _custom(self) -> dict[str, Any]:
        """Cairn's part of Orbax's custom metadata: items, and stored forms of leaves."""
        return {
            "version": 1,
            "items": sorted([*self._items, META_ITEM]),
            "meta_digest": self.meta_digest,  # Orbax keeps JSON without a checksum
            "forms": {
                name: {
                    path: [form.kind, list(form.shape), form.dtype]
                    for path, form in item.forms.items()
                }
                for name, item in self._items.items()
                if item.forms
            },
        }

    def _record_readers(self) -> None:
        """Add to the step's metadata, for each item, the Orbax handler that can read it.

        Raises:
            SaveError: the metadata lack what Orbax was given to record.
        """
        objects = ObjectStore(self._folder, patient=True)
        stored = objects.read(STEP_METADATA)
        metadata = {} if stored is None else json.loads(stored.value)
        if metadata.get("custom_metadata") != {CUSTOM_KEY: self._custom}:
            raise SaveError(
                "what Orbax has recorded is not what it was given",
                path=self._folder / STEP_METADATA,
                expected=f"Cairn's part of it: {self._custom}"[:400],
                found=str(metadata.get("custom_metadata"))[:400],
                next_step="Save again; the step is not listed.",
            )
        metadata["item_handlers"] = {META_ITEM: _name_of(ocp.handlers.JsonHandler)} | {
            name: _name_of(ocp.handlers.PyTreeHandler) for name in sorted(self._written)
        }
        text = json.dumps(metadata).encode()
        objects.write(STEP_METADATA, text)
        self._files.append(stored_file(STEP_METADATA, text))


def commit_text(folder: StoreURI) -> bytes:
    """Return the content of Orbax's commit marker file in a folder."""
    return b"Checkpoint commit was successful to " + orbax_folder(folder).encode()


def begin_step(
    folder: StoreURI,
    items: Mapping[str, HostTree],
    meta: Mapping[str, Any],
    iterators: Mapping[str, IteratorState],
    key: str,
    check: Callable[[], object] | None = None,
) -> StepWrite:
    """Return the write of a step into `folder`, which must not exist; see `StepWrite`.

    In a job of one process, the write has not begun: that takes Orbax some tens of milliseconds,
    and `StepWrite.result` does it in the background. In larger jobs, beginning uses devices, in an
    order that must be the same on all processes, so the write has begun when this returns.
    """
    write = StepWrite(folder, items, meta, iterators, key, check)
    if jax.process_count() > 1:
        write.begin()
    return write


def _refuse_taken(folder: StoreURI) -> None:
    """Check that the step's folder does not exist: plain Orbax in the same root may have made it.

    Orbax itself checks only after all writes, and its error does not say who wrote the folder.

    Raises:
        SaveError: the folder, or Orbax's temporary folder of the step, exists.
    """
    if folder.scheme == "file":  # Orbax writes a temporary folder beside it, and renames that
        temporary = f"{folder.name}{TEMPORARY}"
        beside = (entry.name for entry in open_files(folder.parent).list())
        taken = [name for name in beside if name == folder.name or name.startswith(temporary)]
    else:
        taken = [folder.name] if open_files(folder).list() else []
    if taken:
        raise SaveError(
            "the step's folder is there already",
            path=folder,
            expected="none: nobody but the run's writer saves below its attempts",
            found=f"{', '.join(sorted(taken))}, which this save did not write and leaves alone",
            next_step="Save again, which begins another attempt, and let whatever else writes "
            "there write elsewhere.",
        )


def _name_of(handler: type) -> str:
    """Return a handler's name as Orbax records it and looks it up."""
    return f"{handler.__module__}.{handler.__qualname__}"


def _context(folder: StoreURI) -> Any:
    context = ocp.Context()
    if folder.scheme == "s3":  # of its own Orbax would rename there, which copies every object
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    # `_refuse_taken` has checked this, and Orbax's own check is slower.
    context.file.skip_sync_file_validations = True
    context.asynchronous.timeout_secs = _TIMEOUT_SECONDS
    if jax.process_count() > 1:
        # Orbax's barriers take 300 s to notice a failed process. We use `processes.meet` and
        # `processes.share_outcome` instead, and let Orbax believe that each process is alone.
        context.multiprocessing.active_processes = {int(jax.process_index())}
    return context
