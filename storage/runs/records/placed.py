"""Reads and writes of a run's records; each record names its place: run id and file name.

A run's id is created with its `run.json`. Readers refuse a record whose place is another: it comes
from another run, or was written under another name.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from cairn.storage.errors import (
    CorruptionError,
    RunNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from cairn.storage.runs.records.layout import LEASE_FILE, RUN_FILE
from cairn.storage.runs.records.run_info import RunInfo
from cairn.storage.store.objects import ObjectStore, Versioned
from cairn.storage.store.records import Record, RecordLocation, stored_location
from cairn.storage.store.uri import StoreURI

__all__ = [
    "UNREADABLE",
    "expect_run",
    "judge_records",
    "misplaced",
    "parse_record",
    "place_of",
    "put_record",
    "read_record",
    "read_records",
    "read_run_info",
    "write_record",
    "write_run_info",
]

UNREADABLE: Final = (CorruptionError, UnsupportedFormatError)
"""Errors of a record that is not what was written, or is of another place."""

_PARSERS_KEPT: Final = 4096

T = TypeVar("T")
R = TypeVar("R", bound=Record)


class _RunIds:
    """Cache of the runs' ids, read once for each store. Safe for use by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[ObjectStore, str] = WeakKeyDictionary()

    def get(self, objects: ObjectStore, *, anew: bool = False) -> str | None:
        """Return the id in `run.json`, or else in the lease; None if neither can be read.

        Args:
            objects: the run's objects.
            anew: ignore the cache, since the run may have been removed and created again.
        """
        with self._lock:
            run_id = self._known.get(objects)
        if run_id is not None and not anew:
            return run_id
        stored = objects.read(RUN_FILE)
        with contextlib.suppress(*UNREADABLE):
            if stored is not None:
                return self.note(objects, RunInfo.parse(stored.value, objects.uri / RUN_FILE))
        lease = objects.read(LEASE_FILE)
        location = None if lease is None else stored_location(lease.value)
        return None if location is None else location.run

    def expect(self, objects: ObjectStore, run_id: str) -> None:
        """Set the cached id of a run."""
        with self._lock:
            self._known[objects] = run_id

    def note(self, objects: ObjectStore, info: RunInfo) -> str:
        """Set and return the cached id of a run, from its record."""
        self.expect(objects, info.id)
        return info.id


_ids: Final = _RunIds()


def place_of(objects: ObjectStore, name: str) -> RecordLocation:
    """Return the place of the record `name` of a run."""
    return RecordLocation(_ids.get(objects), name)


def expect_run(objects: ObjectStore, run_id: str) -> None:
    """Set the id of a run that another process has read, which saves a request."""
    _ids.expect(objects, run_id)


def read_run_info(objects: ObjectStore) -> RunInfo | None:
    """Return `run.json`, or None; records that are written from now on get its run id.

    Raises:
        UnsupportedFormatError, CorruptionError: `run.json` can't be read.
    """
    stored = objects.read(RUN_FILE)
    if stored is None:
        return None
    info = RunInfo.parse(stored.value, objects.uri / RUN_FILE, RecordLocation(None, RUN_FILE))
    _ids.note(objects, info)
    return info


def write_run_info(objects: ObjectStore, info: RunInfo) -> None:
    """Create a run: write `run.json` with a new id, which all its records will have.

    Raises:
        PreconditionFailedError: there is a `run.json` already.
    """
    placed = info.with_location(RecordLocation(uuid4().hex, RUN_FILE))
    objects.write_if(RUN_FILE, placed.to_bytes(), generation=None, same_is_success=True)
    _ids.note(objects, placed)


def read_record(objects: ObjectStore, name: str, kind: type[R]) -> tuple[R, bytes] | None:
    """Return the record at `name` and its generation; None if there is no record.

    Raises:
        UnsupportedFormatError, CorruptionError: the record can't be read, or is of another place.
    """
    stored = objects.read(name)
    return (
        None if stored is None else (parse_record(objects, name, kind, stored), stored.generation)
    )


def parse_record(objects: ObjectStore, name: str, kind: type[R], stored: Versioned) -> R:
    """Return the parsed record that was read at `name`.

    Raises:
        UnsupportedFormatError, CorruptionError: the record can't be read, or is of another place.
    """

    def parsed(run: str | None) -> R:
        return kind.parse(stored.value, objects.uri / name, RecordLocation(run, name))

    run = _ids.get(objects)
    try:
        return parsed(run)
    except CorruptionError:
        # The cached id may be of a run that was removed since: read it again before refusing.
        now = _ids.get(objects, anew=True)
        if now == run:
            raise
        return parsed(now)


def misplaced(objects: ObjectStore, name: str) -> CorruptionError | None:
    """Return the error of an intact record that was written for another place or another run.

    None if its place is `name`, or if the record does not exist or does not name a place. Damaged
    content is no error here: such records take effect by their names alone.
    """
    stored = objects.read(name)
    location = None if stored is None else stored_location(stored.value)
    if location is None:
        return None
    own = place_of(objects, name)
    if location.key == name and own.run in (None, location.run):
        return None
    return CorruptionError(
        "a record of another place",
        path=objects.uri / name,
        expected=f"the record {name}" + ("" if own.run is None else f" of run {own.run!r}"),
        found=f"the record {location.key} of run {location.run!r}",
        next_step="Remove it if nothing of that name was written, or see what `cairn repair` can "
        "do.",
    )


def read_records(
    objects: ObjectStore,
    names: Iterable[str],
    parse: Callable[[bytes, object, RecordLocation], T],
) -> dict[str, T]:
    """Return the parsed records at `names`, by name; absent records are left out.

    Args:
        objects: the run's objects.
        names: names of the records.
        parse: parser such as `Alias.parse`; pass the same function each time, see `parse_many`.

    Raises:
        UnsupportedFormatError, CorruptionError: a record can't be read, or is of another place.
    """
    records, unreadable = judge_records(objects, names, parse)
    for error in unreadable.values():
        raise error.with_traceback(None)
    return records


def judge_records(
    objects: ObjectStore,
    names: Iterable[str],
    parse: Callable[[bytes, object, RecordLocation], T],
) -> tuple[dict[str, T], dict[str, StorageError]]:
    """Return records as `read_records` does, and the errors of unreadable records, by name."""
    names = list(names)
    run = _ids.get(objects)
    parsed = objects.parse_many(names, _parser(parse, objects.uri, run))
    if any(isinstance(record, CorruptionError) for record in parsed.values()):
        now = _ids.get(objects, anew=True)
        if now != run:
            parsed = objects.parse_many(names, _parser(parse, objects.uri, now))
    readable = {
        name: record for name, record in parsed.items() if not isinstance(record, StorageError)
    }
    unreadable = {
        name: record for name, record in parsed.items() if isinstance(record, StorageError)
    }
    return readable, unreadable


@functools.lru_cache(_PARSERS_KEPT)
def _parser(
    parse: Callable[[bytes, object, RecordLocation], T], root: StoreURI, run: str | None
) -> Callable[[bytes, StoreURI], T | StorageError]:
    """Return a parser that returns errors; cached, since `ObjectStore.parse_many` caches by it."""
    above = f"{root.path}/" if root.path else ""

    def parsed(data: bytes, path: StoreURI) -> T | StorageError:
        try:
            return parse(data, path, RecordLocation(run, path.path.removeprefix(above)))
        except UNREADABLE as exc:
            return exc.without_traceback()

    return parsed


def put_record(objects: ObjectStore, name: str, record: Record) -> None:
    """Write `record` at `name`, and replace an existing record.

    Raises:
        StoreFullError: no space or quota left.
        RunNotFoundError: as in `write_record`.
    """
    data = record.with_location(RecordLocation(_ids.get(objects) or "", name)).to_bytes()
    _ensure_in_a_run(objects, name, objects.write(name, data))


def write_record(
    objects: ObjectStore,
    name: str,
    record: R,
    *,
    generation: bytes | None,
    same_is_success: bool = True,
) -> tuple[R, bytes]:
    """Write `record` at `name` by compare-and-swap; return it as written, and its generation.

    Args:
        objects: the run's objects.
        name: name of the record in the run.
        record: the record; its place is set here.
        generation: as in `ObjectStore.write_if`.
        same_is_success: as in `ObjectStore.write_if`.

    Raises:
        PreconditionFailedError: the object changed; `current` is a `Versioned`, or None if absent.
        StoreFullError: no space or quota left.
        RunNotFoundError: the run's folder was moved or removed meanwhile; the record was removed.
    """
    placed = record.with_location(RecordLocation(_ids.get(objects) or "", name))
    written = objects.write_if(
        name, placed.to_bytes(), generation=generation, same_is_success=same_is_success
    )
    _ensure_in_a_run(objects, name, written)
    return placed, written


def _ensure_in_a_run(objects: ObjectStore, name: str, generation: bytes) -> None:
    """Delete a record again if its write created the run's folder anew; raise RunNotFoundError.

    On a disk a run can be renamed at any moment; earlier records moved with it. A bucket has no
    folders: there the publisher of a step checks that the run still exists.
    """
    if objects.uri.scheme != "file":
        return
    heads = {RUN_FILE, LEASE_FILE} - {name}  # a run that lost one of them has the other
    if any(_may_be_there(os.path.join(objects.uri.local_path, head)) for head in heads):
        return
    with contextlib.suppress(StorageError):
        objects.delete_if(name, generation=generation)
    raise RunNotFoundError(
        "the run was moved or removed",
        path=objects.uri / name,
        expected=f"{RUN_FILE} beside it once it was written",
        found="none",
        next_step="Do it again where the run is now.",
    )


def _may_be_there(path: str) -> bool:
    """Return False only if the file certainly does not exist; only then may a record be deleted."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
