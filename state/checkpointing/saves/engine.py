"""Engine of a save: Orbax opens and commits a step, Cairn writes its items in between.

This file has all calls to Orbax of a save, through its public API. To Orbax a step is one
`StatefulCheckpointable`: it creates the folder, calls us, and commits. Imports JAX and Orbax.
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
"""Seconds that Orbax waits for a save; our own deadlines end a save long before."""

_ENDING_SECONDS: Final = 10.0
"""Seconds that Orbax may take to end a save whose items failed."""

R = TypeVar("R")

TEMPORARY: Final = ".orbax-checkpoint-tmp"
"""Orbax's suffix to the name of a step's folder until the step is complete."""


def orbax_folder(uri: StoreURI) -> str:
    """Return the folder in the form that Orbax takes.

    Raises:
        InvalidURIError: Orbax would write elsewhere: it knows local disks and GCS only.
    """
    if uri.scheme not in ("file", "gs"):
        raise InvalidURIError(
            "no arrays can be stored here",
            path=uri,
            expected="a file:// or gs:// URI",
            found=f"{uri.scheme}://",
            next_step="Save to a local disk or to Google Cloud Storage.",
        )
    return uri.orbax_path()


class StepWrite:
    """Write of a step. To Orbax it is a `StatefulCheckpointable` that can only save.

    Attributes:
        key: name of the barriers of the job's processes.
        begun: True once this may have written files; files in the folder before are not its own.
        committed: True once Orbax has committed the step.
        given_up: True once this stopped waiting for Orbax, because the store did not answer in
            time. Nobody reads what Orbax may still write, and this writes nothing any more.
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
            key: name of the barriers of the job's processes, different for each write.
            check: called in parallel with the writers; if it raises, nothing is committed.
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

        With several processes this waits for the others and uses devices: call it at the same point
        of their device computations in all of them.

        Raises:
            SaveError: the step's folder exists already; nothing was written.
            StoreUnavailableError: the store gives no answer.
        """
        if exchange.is_primary():
            _refuse_taken(self._folder)
        self.begun = True
        # Orbax's start uses the devices of all processes, and would wait for a failed one.
        background.meet(self.key, "start")
        self._response = self._watched(self._open)

    def result(self) -> Mapping[str, WrittenTree]:
        """Wait for Orbax's commit; return what this process wrote, by item. Call `begin` if needed.

        Raises:
            Exception: the error of the writers or of Orbax; no write of this process runs any more.
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
        with _context():
            return ocp.save_checkpointables_async(
                orbax_folder(self._folder),
                {META_ITEM: self},
                custom_metadata={CUSTOM_KEY: self._custom},
            )

    def _watched(self, call: Callable[[], R]) -> R:
        """Run a call of Orbax with a deadline: on remote stores Orbax has none.

        Raises:
            StoreUnavailableError: no answer came in time.
            Exception: the error of the writers or of Orbax.
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
        """In process 0, the files written beside the items, named from the step's folder.

        Orbax's own files come on top: it writes its commit mark last.
        """
        return list(self._files)

    @cached_property
    def meta_digest(self) -> str:
        """Digest of the JSON item's canonical form."""
        return sha256_of(canonical_json(dict(self._meta)))

    async def save(self, directory: Any) -> Awaitable[None]:
        """Return, to Orbax, the coroutine that writes the items once the folder exists."""
        return self._save(directory)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Refuse: Orbax never calls this, as a step is read by Orbax's own handlers.

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
            with self._progress.paused():  # our own waits have deadlines
                self._write(folder)
        except Exception as exc:
            self._failure = exc
            self._progress.end_within(_ENDING_SECONDS)
            raise

    def _write(self, folder: StoreURI) -> None:
        """Write all items; when this returns or raises, no write runs any more."""
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
        # Processes without a shared memory tell process 0 through the store what they wrote.
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
        """Write, in process 0, the index and the markers that make the step complete."""
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
        """Write the JSON item and the states of iterators."""
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
        """Record Orbax's handler for each item in the step's metadata."""
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
    """Return the content of Orbax's commit marker of a folder."""
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

    Orbax takes some tens of milliseconds to begin. With one process `StepWrite.result` does that,
    in the background. With several it uses devices, in an order that must be the same in all: then
    it has begun when this returns.
    """
    write = StepWrite(folder, items, meta, iterators, key, check)
    if jax.process_count() > 1:
        write.begin()
    return write


def _refuse_taken(folder: StoreURI) -> None:
    """Raise if somebody else, such as plain Orbax in the same root, has written this step here.

    Orbax checks only after all writes, and its error does not tell whose the folder is.
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


def _context() -> Any:
    context = ocp.Context()
    # `_refuse_taken` has checked this, and Orbax's own check is slower.
    context.file.skip_sync_file_validations = True
    context.asynchronous.timeout_secs = _TIMEOUT_SECONDS
    if jax.process_count() > 1:
        # Orbax's barriers take 300 s to notice a failed process. We use `processes.meet` and
        # `processes.share_outcome` instead, and let Orbax believe that each process is alone.
        context.multiprocessing.active_processes = {int(jax.process_index())}
    return context
