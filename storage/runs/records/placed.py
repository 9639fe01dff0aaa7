"""Reading and writing the records of a run: each says where it belongs, and is refused elsewhere.

A run's id is made with its `run.json` and stands in every record of it: one that comes from
another run, or has another's name, is found by whoever reads it.
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
from cairn.storage.store import ObjectStore, Place, Record, StoreURI, Versioned, place_told

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
"""What a record raises that is not what was written, or not there."""

_PARSERS_KEPT: Final = 4096

T = TypeVar("T")
R = TypeVar("R", bound=Record)


class _RunIds:
    """The ids of runs, read once for each store. Safe for use by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[ObjectStore, str] = WeakKeyDictionary()

    def get(self, objects: ObjectStore, *, anew: bool = False) -> str | None:
        """The id in `run.json`, or in the lease if that is lost; None if neither can be read.

        Args:
            objects: the run's objects.
            anew: look again: the run may have been removed and begun anew.
        """
        with self._lock:
            known = self._known.get(objects)
        if known is not None and not anew:
            return known
        found = objects.read(RUN_FILE)
        with contextlib.suppress(*UNREADABLE):
            if found is not None:
                return self.note(objects, RunInfo.parse(found.value, objects.uri / RUN_FILE))
        lease = objects.read(LEASE_FILE)
        told = None if lease is None else place_told(lease.value)
        return None if told is None else told.run

    def expect(self, objects: ObjectStore, run_id: str) -> None:
        """Take this for the id of the run that is there now."""
        with self._lock:
            self._known[objects] = run_id

    def note(self, objects: ObjectStore, info: RunInfo) -> str:
        """The id of the run that is there now."""
        self.expect(objects, info.id)
        return info.id


_ids: Final = _RunIds()


def place_of(objects: ObjectStore, name: str) -> Place:
    """Where the record `name` of a run belongs."""
    return Place(_ids.get(objects), name)


def expect_run(objects: ObjectStore, run_id: str) -> None:
    """Take the run for the one of this id, as somebody has read who tells; saves a request."""
    _ids.expect(objects, run_id)


def read_run_info(objects: ObjectStore) -> RunInfo | None:
    """What `run.json` says now; records that are written next belong to that run.

    Raises:
        UnsupportedFormatError, CorruptionError: it can't be read.
    """
    found = objects.read(RUN_FILE)
    if found is None:
        return None
    info = RunInfo.parse(found.value, objects.uri / RUN_FILE, Place(None, RUN_FILE))
    _ids.note(objects, info)
    return info


def write_run_info(objects: ObjectStore, info: RunInfo) -> None:
    """Begin a run: store `run.json`, with a new id that its records will have.

    Raises:
        PreconditionFailedError: there is one already.
    """
    placed = info.placed(Place(uuid4().hex, RUN_FILE))
    objects.write_if(RUN_FILE, placed.to_bytes(), generation=None, same_is_success=True)
    _ids.note(objects, placed)


def read_record(objects: ObjectStore, name: str, kind: type[R]) -> tuple[R, bytes] | None:
    """The record at `name` and its generation; None if there is none.

    Raises:
        UnsupportedFormatError, CorruptionError: it can't be read, or belongs elsewhere.
    """
    found = objects.read(name)
    return None if found is None else (parse_record(objects, name, kind, found), found.generation)


def parse_record(objects: ObjectStore, name: str, kind: type[R], stored: Versioned) -> R:
    """The record that was read at `name`.

    Raises:
        UnsupportedFormatError, CorruptionError: it can't be read, or belongs elsewhere.
    """

    def parsed(run: str | None) -> R:
        return kind.parse(stored.value, objects.uri / name, Place(run, name))

    run = _ids.get(objects)
    try:
        return parsed(run)
    except CorruptionError:
        now = _ids.get(objects, anew=True)
        if now == run:
            raise
        return parsed(now)


def misplaced(objects: ObjectStore, name: str) -> CorruptionError | None:
    """What is wrong with a record that was written, whole, for another place or another run.

    None if it belongs to `name`, is not there, or says nothing: what counts by its name alone does.
    """
    found = objects.read(name)
    told = None if found is None else place_told(found.value)
    if told is None:
        return None
    own = place_of(objects, name)
    if told.key == name and own.run in (None, told.run):
        return None
    return CorruptionError(
        "a record of another place",
        path=objects.uri / name,
        expected=f"the record {name}" + ("" if own.run is None else f" of run {own.run!r}"),
        found=f"the record {told.key} of run {told.run!r}",
        next_step="Remove it if nothing of that name was written, or see what `cairn repair` can "
        "do.",
    )


def read_records(
    objects: ObjectStore,
    names: Iterable[str],
    parse: Callable[[bytes, object, Place], T],
) -> dict[str, T]:
    """What `parse` makes of the records at `names`; absent ones are left out.

    Args:
        objects: the run's objects.
        names: of the records.
        parse: such as `Alias.parse`; give the same function each time, see `parse_many`.

    Raises:
        UnsupportedFormatError, CorruptionError: one can't be read, or belongs elsewhere.
    """
    found, unreadable = judge_records(objects, names, parse)
    for error in unreadable.values():
        raise error.with_traceback(None)
    return found


def judge_records(
    objects: ObjectStore,
    names: Iterable[str],
    parse: Callable[[bytes, object, Place], T],
) -> tuple[dict[str, T], dict[str, StorageError]]:
    """As `read_records`, but those that can't be read are told beside the others, by name."""
    names = list(names)
    run = _ids.get(objects)
    found = objects.parse_many(names, _parser(parse, objects.uri, run))
    if any(isinstance(one, CorruptionError) for one in found.values()):
        now = _ids.get(objects, anew=True)
        if now != run:
            found = objects.parse_many(names, _parser(parse, objects.uri, now))
    readable = {name: one for name, one in found.items() if not isinstance(one, StorageError)}
    unreadable = {name: one for name, one in found.items() if isinstance(one, StorageError)}
    return readable, unreadable


@functools.lru_cache(_PARSERS_KEPT)
def _parser(
    parse: Callable[[bytes, object, Place], T], root: StoreURI, run: str | None
) -> Callable[[bytes, StoreURI], T | StorageError]:
    """One function for the same arguments, as `ObjectStore.parse_many` wants."""
    above = f"{root.path}/" if root.path else ""

    def parsed(data: bytes, path: StoreURI) -> T | StorageError:
        try:
            return parse(data, path, Place(run, path.path.removeprefix(above)))
        except UNREADABLE as exc:
            return exc.to_keep()

    return parsed


def put_record(objects: ObjectStore, name: str, record: Record) -> None:
    """Store `record` at `name` whatever is there.

    Raises:
        StoreFullError: no space or quota left.
        RunNotFoundError: as in `write_record`.
    """
    data = record.placed(Place(_ids.get(objects) or "", name)).to_bytes()
    _ensure_in_a_run(objects, name, objects.write(name, data))


def write_record(
    objects: ObjectStore,
    name: str,
    record: R,
    *,
    generation: bytes | None,
    same_is_success: bool = True,
) -> tuple[R, bytes]:
    """Store `record` at `name`, if that is still as last seen; it as written, the new generation.

    Args:
        objects: the run's objects.
        name: where.
        record: what to write; it is told its place.
        generation: as in `ObjectStore.write_if`.
        same_is_success: as there.

    Raises:
        PreconditionFailedError: it changed; `current` is a `Versioned`, or None if absent.
        StoreFullError: no space or quota left.
        RunNotFoundError: the run's folder was moved or removed meanwhile; nothing is left there.
    """
    placed = record.placed(Place(_ids.get(objects) or "", name))
    written = objects.write_if(
        name, placed.to_bytes(), generation=generation, same_is_success=same_is_success
    )
    _ensure_in_a_run(objects, name, written)
    return placed, written


def _ensure_in_a_run(objects: ObjectStore, name: str, generation: bytes) -> None:
    """Take a record back that made a folder anew: on a disk a run can be renamed at any moment.

    What was written before that went with the run. A bucket has no folders; who publishes a step
    there looks whether the run is there still.
    """
    if objects.uri.scheme != "file":
        return
    heads = {RUN_FILE, LEASE_FILE} - {name}  # a run that has lost the one has the other
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
    """Whether there is a file, or a disk that can't tell: nothing is taken back then."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
