"""Collection of garbage: expired trash, abandoned steps, exports of removed steps.

`find_garbage` makes a plan and changes nothing; `collect_garbage` checks each entry again and
removes it. Both are safe beside a live writer: files of an attempt that may still publish are never
touched. An attempt may publish until a later one exists or its lease was given back. So before
anything of a dead writer's attempt is removed, that attempt is ended by beginning the next one,
long after its lease has expired. Superseded steps stay, because a rollback can be undone. A step
that overwrote another keeps its tombstone until the other step is gone too.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import partial

from cairn.storage.errors import (
    CorruptionError,
    LeaseHeldError,
    StorageError,
    UnsupportedFormatError,
)
from cairn.storage.runs.lease import begin_attempt, is_dead, read_lease, release
from cairn.storage.runs.records.attempts import find_superseded, list_attempts
from cairn.storage.runs.records.exports import ExportKey, find_export, left_tries
from cairn.storage.runs.records.layout import (
    EXPORTS,
    MAX_NUMBER,
    annotation_file,
    manifest_file,
    parse_export_manifest,
    step_dir,
)
from cairn.storage.runs.retention import PolicyJudge
from cairn.storage.runs.rollback import last_to_keep
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.runs.trash import (
    StepKey,
    begin_removal,
    clear_announcements,
    end_removal,
    read_tombstones,
)
from cairn.storage.store.clock import Clock, utc_now
from cairn.storage.store.files import FileUsage

__all__ = ["Garbage", "GarbageKind", "collect_garbage", "find_garbage"]


class GarbageKind(StrEnum):
    """Kind of garbage.

    trash: a deleted step whose grace time is over.
    abandoned: an incomplete step of an attempt that can't publish any more.
    export: an export of a removed step; a try other than the published one; or the remains of a try
    that found no room in the store more than a day ago.
    """

    TRASH = "trash"
    ABANDONED = "abandoned"
    EXPORT = "export"


@dataclass(frozen=True)
class Garbage:
    """Entry to remove.

    Attributes:
        kind: kind of garbage.
        name: folder or object, relative to the run.
        nbytes: bytes that are freed, including a deleted step's exports. Files that other names
            link to free none.
        reason: why it is not needed.
        step: the step to which it belongs; None if it belongs to none.
        attempt: the attempt of that step.
    """

    kind: GarbageKind
    name: str
    nbytes: int
    reason: str
    step: int | None = None
    attempt: int | None = None


def find_garbage(run: Run, *, clock: Clock = utc_now) -> list[Garbage]:
    """Return what could be removed now, and change nothing.

    Raises:
        UnsupportedFormatError, CorruptionError: a record that decides about steps can't be read or
            is lost, so that nothing can be judged.
    """
    run.history().require_whole()
    now = clock()
    trash = [*_trash(run, now)]
    going = {(entry.step, entry.attempt) for entry in trash}
    exports = [entry for entry in _exports(run, now) if (entry.step, entry.attempt) not in going]
    garbage = [*trash, *_abandoned(run, _ended_attempts(run, now)), *exports]
    places = [_places(entry) for entry in garbage]
    if run.uri.scheme != "file":  # a bucket has no links, and listing the whole run would be slow
        sizes = [sum(_bytes_below(run, name) for name in names) for names in places]
    else:
        sizes = _unlinked(run.files.usage(), places) if places else []
    return [replace(entry, nbytes=size) for entry, size in zip(garbage, sizes, strict=True)]


def collect_garbage(
    run: Run,
    *,
    by: str,
    progress: Callable[[Garbage], None] | None = None,
    clock: Clock = utc_now,
) -> list[Garbage]:
    """Remove the garbage that `find_garbage` returns, and return it.

    An interrupted call can be repeated.

    Args:
        run: the run.
        by: the caller's name; it is also the writer of an attempt that ends a dead writer's
            attempt.
        progress: called after each removal; if it raises, the collection ends.
        clock: returns the current time in UTC.

    Raises:
        UnsupportedFormatError, CorruptionError: as `find_garbage`.
        StorageError: the store refuses a removal; earlier removals of this call remain.
    """
    run.history().require_whole()
    _end_dead_attempt(run, by=by, clock=clock)
    clear_announcements(run, now=clock())
    files = run.files
    files.sweep("")  # partial files, and locks of names that nobody may write again
    judge = PolicyJudge(run, clock=clock)
    covers_older = _covers_older(run)  # judged once: from here on older copies can only go
    removed = []
    for garbage in find_garbage(run, clock=clock):
        if garbage.kind is GarbageKind.TRASH:
            assert garbage.step is not None
            assert garbage.attempt is not None
            key = garbage.step, garbage.attempt
            if not begin_removal(run, key, now=clock(), keeps=partial(judge.keeps, key)):
                continue
            # The manifest first: from then on nobody can use the step, whatever of it is left.
            run.objects.delete(manifest_file(*key))
            files.delete_tree(garbage.name)
            files.delete_tree(f"{EXPORTS}{key[0]}.{key[1]}")
            run.objects.delete(annotation_file(*key))
            # The tombstone last: until then a repeated call finishes an interrupted removal.
            end_removal(run, key, stays=covers_older(key), now=clock())
        elif garbage.kind is GarbageKind.EXPORT and not _is_lost_export(run, garbage, clock()):
            continue  # it was published meanwhile
        else:
            files.delete_tree(garbage.name)
            if garbage.kind is GarbageKind.EXPORT:
                # After the folder: without this record no later call would find the folder's files.
                files.delete_tree(f"{garbage.name}.json")
        removed.append(garbage)
        if progress is not None:
            progress(garbage)
    return removed


def _trash(run: Run, now: datetime) -> Iterator[Garbage]:
    covers_older = _covers_older(run)
    aliased = {(alias.step, alias.attempt) for alias in run.aliases.list()}
    for (step, attempt), tombstone in sorted(read_tombstones(run.objects).items()):
        if (step, attempt) in aliased and not tombstone.removing:
            continue
        if tombstone.removed and covers_older((step, attempt)):
            continue
        if tombstone.removing or tombstone.has_expired(now):
            folder = step_dir(attempt, step)
            why = f"deleted {tombstone.at}" + (f" by {tombstone.by}" if tombstone.by else "")
            yield Garbage(GarbageKind.TRASH, folder, 0, why, step, attempt)


def _covers_older(run: Run) -> Callable[[StepKey], bool]:
    """Return a function of (step, attempt): True if that step hides an older one that it overwrote.

    Without the tombstone of the newer step, the older one would be listed again. The older one may
    itself be deleted, since a deletion can be undone.
    """
    published = run.published()
    attempts = run.attempts()  # after the manifests, so that each one's attempt is among them
    # Overwrites don't supersede here: the overwriting step may be removed next.
    is_superseded = find_superseded(attempts, ())
    older = [key for key in published if not is_superseded(*key)]
    overwrites = {attempt.number: attempt.overwrites for attempt in attempts}

    def covers(key: StepKey) -> bool:
        last = MAX_NUMBER if overwrites.get(key[1]) == key[0] else key[0]
        return any(key[0] <= step <= last and attempt < key[1] for step, attempt in older)

    return covers


def _abandoned(run: Run, ended: set[int]) -> Iterator[Garbage]:
    for info in run.unpublished():
        if info.state is not StepState.ABANDONED or info.attempt not in ended:
            continue
        for name in _folders_of(run, info):
            why = f"attempt {info.attempt} ended before the step was complete"
            yield Garbage(GarbageKind.ABANDONED, name, 0, why, info.step, info.attempt)


def _folders_of(run: Run, info: StepInfo) -> list[str]:
    """Return the folders of a step: its own, and temporary ones that Orbax would rename to it."""
    own = step_dir(info.attempt, info.step)
    parent, _, last = own.rpartition("/")
    return [
        f"{parent}/{entry.name}"
        for entry in run.files.list(parent)
        if entry.is_dir
        and (entry.name == last or entry.name.startswith(f"{last}.orbax-checkpoint-tmp"))
    ]


def _exports(run: Run, now: datetime) -> Iterator[Garbage]:
    """Yield exports of steps without a manifest, tries beside a published one, and old remains."""
    files = run.files
    for steps in files.list(EXPORTS):
        if not steps.is_dir:
            continue
        step_text, _, attempt_text = steps.name.partition(".")
        if not (step_text.isdecimal() and attempt_text.isdecimal()):
            continue
        step, attempt = int(step_text), int(attempt_text)
        folder = f"{EXPORTS}{steps.name}"
        if run.objects.read(manifest_file(step, attempt)) is None:
            why = f"step {step} of attempt {attempt} is gone"
            yield Garbage(GarbageKind.EXPORT, folder, 0, why, step, attempt)
            continue
        names = {entry.name.removesuffix(".json") for entry in files.list(folder)}
        for key in filter(None, (_export_key(f"{folder}/{name}.json") for name in sorted(names))):
            for name, why in _lost_tries(run, key, now).items():
                yield Garbage(GarbageKind.EXPORT, key.try_folder(name), 0, why, step, attempt)


def _lost_tries(run: Run, key: ExportKey, now: datetime) -> dict[str, str]:
    """Return the unneeded tries at an export, each with the reason.

    A try without a record may still be running, unless another try was published.
    """
    try:
        counting = find_export(run.objects, key)
    except (CorruptionError, UnsupportedFormatError):  # a damaged manifest: keep everything
        return {}
    if counting is None:
        return {
            name: f"it ran out of room {left.at}, and nobody went on with it"
            for name, left in left_tries(run.objects, key).items()
            if left.is_old(now)
        }
    tries = {entry.name.removesuffix(".json") for entry in run.files.list(key.folder)}
    why = f"{counting.folder} is the try that counts"
    return dict.fromkeys(sorted(tries - {counting.folder}), why)


def _is_lost_export(run: Run, garbage: Garbage, now: datetime) -> bool:
    """Return True if an export, or a try at one, is still garbage right before its removal."""
    assert garbage.step is not None
    assert garbage.attempt is not None
    if run.objects.read(manifest_file(garbage.step, garbage.attempt)) is None:
        return True
    folder, _, name = garbage.name.rpartition("/")
    key = _export_key(f"{folder}.json")
    return key is not None and name in _lost_tries(run, key, now)


def _export_key(manifest: str) -> ExportKey | None:
    parts = parse_export_manifest(manifest)
    return None if parts is None else ExportKey(*parts)


def _ended_attempts(run: Run, now: datetime) -> set[int]:
    """Return the attempts that can't publish any more, or whose writers count as dead."""
    numbers = [attempt.number for attempt in list_attempts(run.objects)]
    ended = set(numbers[:-1])
    lease = read_lease(run.objects)
    if numbers and lease is not None and (lease.released or is_dead(lease, now)):
        ended.add(numbers[-1])
    return ended


def _end_dead_attempt(run: Run, *, by: str, clock: Clock) -> None:
    """Begin an attempt after a dead writer's, which can't publish then even if it wakes up."""
    lease = read_lease(run.objects)
    now = clock()
    if lease is None or lease.released or not is_dead(lease, now):
        return
    if next(_abandoned(run, _ended_attempts(run, now)), None) is None:
        return  # there is nothing to remove

    with contextlib.suppress(LeaseHeldError):  # the writer woke up, or was started again, just now
        begun = begin_attempt(
            run.objects, writer=by, base_step=lambda: last_to_keep(run), clock=clock
        )
        release(run.objects, begun, clock=clock)


def _places(garbage: Garbage) -> list[str]:
    """Return the folders and objects that are removed with an entry."""
    if garbage.kind is GarbageKind.TRASH:
        return [garbage.name, f"{EXPORTS}{garbage.step}.{garbage.attempt}"]
    if garbage.kind is GarbageKind.EXPORT:
        return [garbage.name, f"{garbage.name}.json"]
    return [garbage.name]


def _unlinked(files: Collection[FileUsage], places: Sequence[Collection[str]]) -> list[int]:
    """Return, for each group of places, the bytes of files that have no name outside the groups.

    A file with names in several groups counts only for the group of its first name in `files`.
    """
    owners = {place: at for at, some in enumerate(places) for place in some}
    names = Counter(file.identity for file in files)
    sizes = [0] * len(places)
    first: dict[object, int] = {}
    for file in files:
        place = file.name
        while place and place not in owners:
            place = place.rpartition("/")[0]
        if not place:
            continue
        names[file.identity] -= 1
        owner = first.setdefault(file.identity, owners[place])
        if names[file.identity] == 0:
            sizes[owner] += file.size
    return sizes


def _bytes_below(run: Run, name: str) -> int:
    files = run.files
    with contextlib.suppress(StorageError):
        entries = files.walk(name)
        return sum(entry.size for entry in entries) if entries else files.stat(name).size
    return 0
