"""Repair of a run's damaged or lost records from its other records; nothing is guessed.

`docs/howto/verify.md` says for each kind of record from which others it is rebuilt, and when it
can't be. A replaced record is kept below `damaged/`, by its name and the SHA-256 of its bytes.
"""

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final

from cairn.storage.errors import LeaseHeldError, RecordNotLostError
from cairn.storage.runs.history import History, judge_lease, read_history
from cairn.storage.runs.lease import LEASE_TTL_SECONDS, Lease, forget_durable
from cairn.storage.runs.records.aliases import Alias
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.attempts import AttemptRecord
from cairn.storage.runs.records.exports import ExportManifest
from cairn.storage.runs.records.layout import (
    ATTEMPTS,
    DAMAGED,
    INDEX_FILE,
    LEASE_FILE,
    RUN_FILE,
    RUN_FOLDERS,
    attempt_file,
    forgotten_file,
    manifest_file,
    parse_alias_file,
    parse_annotation_file,
    parse_attempt_file,
    parse_export_manifest,
    parse_hold_file,
    parse_intent_file,
    parse_manifest_file,
    parse_trash_file,
    step_dir,
    trash_file,
)
from cairn.storage.runs.records.manifest import Manifest, ManifestSummary
from cairn.storage.runs.records.placed import (
    UNREADABLE,
    judge_records,
    misplaced,
    parse_record,
    place_of,
    write_record,
)
from cairn.storage.runs.records.run_info import RunInfo
from cairn.storage.runs.records.step_index import parse_index
from cairn.storage.runs.run import Run
from cairn.storage.runs.run_check import RunReport, check_run, run_ids
from cairn.storage.runs.trash import GRACE_SECONDS, Hold, Intent, Tombstone
from cairn.storage.store.bounds import Oversized
from cairn.storage.store.clock import Clock, rfc3339, utc_now
from cairn.storage.store.objects import Versioned
from cairn.storage.store.open_files import open_files
from cairn.storage.store.records import Record, RecordLocation, sha256_of

__all__ = ["Repair", "repair_run"]

_ORDER: Final = (RUN_FILE, ATTEMPTS, LEASE_FILE)
"""Order of repairs: these come first, since other records are checked or rebuilt from them."""

_KINDS: Final[tuple[tuple[Callable[[str], object], type[Record]], ...]] = (
    (lambda name: name == LEASE_FILE or None, Lease),
    (parse_attempt_file, AttemptRecord),
    (parse_manifest_file, Manifest),
    (parse_alias_file, Alias),
    (parse_annotation_file, Annotation),
    (parse_trash_file, Tombstone),
    (parse_intent_file, Intent),
    (parse_hold_file, Hold),
    (parse_export_manifest, ExportManifest),
)
"""Pairs of a parser of record names, and the class of such records."""


_FORGET: Final = "forget it"


@dataclass(frozen=True)
class Repair:
    """Damaged or lost record, and its repair.

    Attributes:
        name: name of the record.
        action: description of the repair; None if there is none.
        hint: what a person can do if there is no repair.
        done: True if the action was carried out.
    """

    name: str
    action: str | None
    hint: str = ""
    done: bool = False


class _Fix:
    """Repair with the function that carries it out."""

    def __init__(self, repair: Repair, do: Callable[[], None] | None = None) -> None:
        self.repair = repair
        self.do = do


def repair_run(
    run: Run,
    *,
    by: str,
    dry_run: bool = True,
    forget: Collection[str] = (),
    clock: Clock = utc_now,
) -> list[Repair]:
    """Repair the records of a run, and return the repairs.

    Args:
        run: the run, which need not have a `run.json`.
        by: the caller's name.
        dry_run: only return the repairs, and change nothing.
        forget: names of records to give up: they can't be rebuilt, or are of an attempt whose
            record can't be rebuilt.
        clock: returns the current time in UTC.

    Raises:
        LeaseHeldError: a writer is alive; nothing was done.
        RecordNotLostError: `forget` names records that are intact, or that can be rebuilt.
        StorageError: the store refuses a change; earlier repairs of this call remain.
    """
    lease, _ = judge_lease(run.objects)
    if not dry_run and lease is not None and lease.is_alive(clock()):
        raise LeaseHeldError(
            "a writer holds the run",
            path=run.uri,
            expected="no writer while records are mended",
            found=f"{lease.writer} (attempt {lease.attempt}) until {lease.expires}",
            next_step="Stop that job first, or wait until its lease has expired.",
            holder=lease.writer,
        )
    checked = check_run(run)
    # First forget the records of unknown attempts: then no record refers to those attempts any
    # more.
    untold = sorted({*forget}.intersection(_untold(read_history(run.objects)) if forget else ()))
    names = untold + _in_order({*checked.unreadable}.difference(untold))
    fixes = [_Mender(run, by, forget, clock).fix(name) for name in names]
    repairs = [fix.repair for fix in fixes if fix is not None]
    _refuse_forgetting(run, forget, repairs)
    if dry_run:
        return repairs + _left(
            checked, {repair.name for repair in repairs if repair.action is not None}
        )
    done: list[Repair] = []
    while names:
        name = names.pop(0)
        # Judge each record anew: it may be rebuilt from one that was repaired before.
        fix = _Mender(run, by, forget, clock).fix(name)
        if fix is None:
            continue
        if fix.do is not None:
            fix.do()
        done.append(fix.repair if fix.do is None else replace(fix.repair, done=True))
        if name == RUN_FILE and fix.do is not None:  # the others are checked by its id
            names = _in_order({*check_run(run).unreadable} - {RUN_FILE})
    for name in (RUN_FILE, *sorted(RUN_FOLDERS)):
        run.objects.sync(name)  # a repair that died before its fsync may have written them
    return done + _left(check_run(run))


def _untold(history: History) -> list[str]:
    """Return manifests and tombstones of attempts whose base step no record names."""
    names = [(number, manifest_file(step, number)) for step, number in history.published]
    names += [(number, trash_file(step, number)) for step, number in sorted(history.deleted)]
    return [name for number, name in names if number in history.attempts.unknown]


def _left(checked: RunReport, mended: Collection[str] = ()) -> list[Repair]:
    """Return contradictions between intact records, for which there is no repair.

    Args:
        checked: the report of the check.
        mended: names of records that will be repaired; contradictions that name them will vanish.
    """
    lines = [problem.partition(": ") for problem in checked.problems]
    return [
        Repair(name, None, f"{text}. Restore what is lost from a backup, or delete this.")
        for name, _, text in lines
        if name not in checked.unreadable and not any(other in text for other in mended)
    ]


def _in_order(names: Collection[str]) -> list[str]:
    def place(name: str) -> tuple[int, int, str]:
        first = [index for index, start in enumerate(_ORDER) if name.startswith(start)]
        # The newest attempt first: it names the one before it.
        return (*first, len(_ORDER))[0], -(parse_attempt_file(name) or 0), name

    return sorted(names, key=place)


def _refuse_forgetting(run: Run, forget: Collection[str], repairs: list[Repair]) -> None:
    lost = {repair.name for repair in repairs if repair.action in (None, _FORGET)}
    forgettable = {name for name in lost if _can_be_forgotten(name)}
    wrong = sorted(set(forget) - forgettable)
    if wrong:
        raise RecordNotLostError(
            "not to be forgotten",
            path=run.uri,
            expected=", ".join(sorted(forgettable)) or "no record: none is lost for good",
            found=", ".join(wrong),
            next_step="Leave these out.",
        )


def _can_be_forgotten(name: str) -> bool:
    kinds = (parse_manifest_file, parse_alias_file, parse_annotation_file, parse_trash_file)
    return any(parse(name) is not None for parse in kinds)


class _Mender:
    """Rebuilder of records from the present state of the others."""

    def __init__(self, run: Run, by: str, forget: Collection[str], clock: Clock) -> None:
        self._run = run
        self._objects = run.objects
        self._by = by
        self._forget = forget
        self._clock = clock

    def fix(self, name: str) -> _Fix | None:
        """Return the repair of the record `name`; None if it is intact by now."""
        self._found = self._objects.read(name)
        if name in self._forget and name in _untold(read_history(self._objects)):
            return self._forgotten(name)
        if self._found is not None and self._is_whole(name, self._found):
            return None
        if name == RUN_FILE:
            return self._run_file()
        if name == LEASE_FILE:
            return self._lease()
        number = parse_attempt_file(name)
        if number is not None:
            return self._attempt(name, number)
        if parse_trash_file(name) is not None:
            return self._tombstone(name)
        if parse_intent_file(name) is not None or parse_hold_file(name) is not None:
            return self._announcement(name)
        if parse_export_manifest(name) is not None:
            action = "set it aside: the export is made anew when somebody asks for it"
            return _Fix(Repair(name, action), partial(self._set_aside, name))
        if parse_manifest_file(name) is not None:
            return self._manifest(name)
        if _can_be_forgotten(name):
            return self._forgotten(name)
        return _Fix(Repair(name, None, "Restore it from a backup."))

    def _run_file(self) -> _Fix:
        counts = run_ids(self._run)
        run_id, count = counts.most_common(1)[0] if counts else ("", 0)
        if counts and 2 * count <= counts.total():
            hint = (
                f"Other records are of the runs {', '.join(counts)}: take those out that are not."
            )
            return _Fix(Repair(RUN_FILE, None, hint))
        names = [name for name in self._objects.children(ATTEMPTS) if parse_attempt_file(name)]
        attempts, _ = judge_records(self._objects, names, AttemptRecord.parse)
        published = [manifest_file(*key) for key in self._run.published()]
        manifests, _ = judge_records(self._objects, published, ManifestSummary.parse)
        times = [attempt.at for attempt in attempts.values()]
        times += [manifest.created for manifest in manifests.values()]
        info = RunInfo(
            name=self._run.uri.name, created=min(times, default=rfc3339(self._clock()))
        ).with_location(RecordLocation(run_id, RUN_FILE))
        action = (
            f"begin it anew with the id {run_id!r} that the other records have, created "
            f"{info.created}; labels, lineage, environment and the folder it adopts are lost"
        )

        def write() -> None:
            generation = self._keep(RUN_FILE)
            self._objects.write_if(
                RUN_FILE, info.to_bytes(), generation=generation, same_is_success=True
            )

        return _Fix(Repair(RUN_FILE, action), write)

    def _attempt(self, name: str, number: int) -> _Fix | None:
        history = read_history(self._objects)
        if self._found is None and name not in history.problems:
            return None  # the record that named it was forgotten
        attempts = {attempt.number: attempt for attempt in history.attempts.known}
        if number not in attempts:
            own = [other for other in _untold(history) if other.endswith(f".{number}.json")]
            hint = (
                "Restore it from a backup: no other record tells its base step. Or have "
                f"{', '.join(own) or 'it'} forgotten: the run goes on as if this attempt had "
                "saved nothing, and what it had overwritten or gone back before is listed again."
            )
            return _Fix(Repair(name, None, hint))
        base = attempts[number].base_step
        earlier = [attempt for attempt in history.attempts.known if attempt.number < number]
        previous = (earlier[-1].number, earlier[-1].base_step) if earlier else (0, -1)
        lost = [other for other in history.attempts.unknown if previous[0] < other < number]
        if lost:  # the rebuilt record would deny that this attempt existed
            return _Fix(Repair(name, None, f"Restore {attempt_file(lost[-1])} first."))
        own = [manifest_file(*key) for key in history.published if key[1] == number]
        manifests, _ = judge_records(self._objects, own, Manifest.parse)
        after = [
            attempt.at
            for attempt in history.attempts.known
            if attempt.number > number and attempt.at
        ]
        lease, _ = judge_lease(self._objects)
        writers = [manifest.writer for manifest in manifests.values()]
        writers += [lease.writer] if lease is not None and lease.attempt == number else []
        times = sorted(manifest.created for manifest in manifests.values()) + after
        record = AttemptRecord(
            base_step=base,
            writer=(*writers, "")[0],
            at=(*times, rfc3339(self._clock()))[0],
            previous=previous,
            base_attempt=attempts[number].base_attempt,
            overwrites=attempts[number].overwrites,
        )
        action = f"rebuild it: base step {base}, writer {record.writer!r}, after {previous[0]}"
        return _Fix(Repair(name, action), partial(self._write, name, record))

    def _lease(self) -> _Fix:
        history = read_history(self._objects)
        wrong = sorted(set(history.problems) - {LEASE_FILE})
        if wrong or not history.attempts.known:
            hint = f"Mend {', '.join(wrong) or 'the attempts'} first."
            return _Fix(Repair(LEASE_FILE, None, hint))
        newest = history.attempts.known[-1]
        lease = Lease(
            writer=newest.writer,
            attempt=newest.number,
            expires=rfc3339(self._clock() + timedelta(seconds=LEASE_TTL_SECONDS)),
            durable=history.latest(),
            begun=(newest.number, newest.base_step),
        )
        action = (
            f"rebuild it: attempt {newest.number} of {newest.writer!r}, whose writer may go on; "
            f"others wait until {lease.expires}"
        )
        return _Fix(Repair(LEASE_FILE, action), partial(self._write, LEASE_FILE, lease))

    def _tombstone(self, name: str) -> _Fix:
        key = parse_trash_file(name)
        assert key is not None
        if misplaced(self._objects, name) is not None:
            if name in self._forget:
                return _Fix(Repair(name, _FORGET), partial(self._set_aside, name))
            hint = (
                f"Nothing tells whether step {key[0]} of attempt {key[1]} was deleted. Have this "
                "forgotten, and it is listed if it counts; then delete it if it was."
            )
            return _Fix(Repair(name, None, hint))
        now = self._clock()
        tombstone = Tombstone(
            at=rfc3339(now),
            expires=rfc3339(now + timedelta(seconds=GRACE_SECONDS)),
            by=self._by,
            reason="its tombstone was damaged",
            removing=self._objects.read(manifest_file(*key)) is None,
        )
        action = f"rebuild it: the step can be had back until {tombstone.expires}"
        if tombstone.removing:
            action = "rebuild it: the step's removal, which had begun, goes on"
        return _Fix(Repair(name, action), partial(self._write, name, tombstone))

    def _manifest(self, name: str) -> _Fix:
        """Return the repair of a manifest by the step's index; else it can only be given up."""
        key = parse_manifest_file(name)
        assert key is not None
        current = self._objects.read(name)
        if current is None and key not in read_history(self._objects).lost:
            hint = "Nothing is to be done: its step was deleted meanwhile."
            return _Fix(Repair(name, None, hint))
        index = f"{step_dir(key[1], key[0])}/{INDEX_FILE}"
        stored = self._objects.read(index)
        if name in self._forget or stored is None:
            return self._forgotten(name)
        try:
            place = place_of(self._objects, index)
            manifest, _ = parse_index(stored.value, self._objects.uri / index, place)
        except UNREADABLE:
            return self._forgotten(name)
        action = f"rebuild it from {index}: as it was, to the last bit"

        def write() -> None:
            self._keep(name)
            # Only if the store still has what was read here: a removal of the step begins with
            # its manifest.
            generation = None if current is None else current.generation
            write_record(self._objects, name, manifest, generation=generation)

        return _Fix(Repair(name, action), write)

    def _announcement(self, name: str) -> _Fix:
        fields = {
            "at": rfc3339(self._clock()),
            "by": self._by,
            "reason": "repair a damaged record",
        }
        record: Record = Intent(**fields, token=secrets.token_hex(8))
        if parse_hold_file(name) is not None:
            record = Hold(**fields, token=name.split(".")[-3])
        action = "rebuild it: it ends by itself, as every one does"
        return _Fix(Repair(name, action), partial(self._write, name, record))

    def _forgotten(self, name: str) -> _Fix:
        key = parse_manifest_file(name)
        effect = "Restore it from a backup, or have it forgotten"
        if key is not None:
            effect += (
                f": step {key[0]} of attempt {key[1]} is listed no more then, and what it had "
                "overwritten is again; its folder stays a checkpoint that Orbax reads"
            )
        elif parse_alias_file(name) is not None:
            effect += " and promote the step anew"
        if name not in self._forget:
            return _Fix(Repair(name, None, f"{effect}."))

        def forget() -> None:
            if key is not None:
                forget_durable(self._objects, key)
                self._objects.write(forgotten_file(*key), b"")
            self._set_aside(name)

        return _Fix(Repair(name, _FORGET), forget)

    def _write(self, name: str, record: Record) -> None:
        write_record(self._objects, name, record, generation=self._keep(name))

    def _set_aside(self, name: str) -> None:
        generation = self._keep(name)
        if generation is not None:
            self._objects.delete_if(name, generation=generation)

    def _keep(self, name: str) -> bytes | None:
        """Copy the present record to `damaged/` and return its generation, for the replacement."""
        if self._found is None:
            return None
        stored = self._found.value
        digest = sha256_of(stored).removeprefix("sha256:")[:16]
        if isinstance(stored, Oversized):
            files = open_files(self._objects.uri)
            files.copy(name, files, f"{DAMAGED}{name}.{stored.size}")
        else:
            self._objects.write(f"{DAMAGED}{name}.{digest}", stored)
        return self._found.generation

    def _is_whole(self, name: str, stored: Versioned) -> bool:
        """Return True if a record is intact; another repair may have rebuilt it."""
        if name == RUN_FILE:
            return self._is_own_run_file(stored)
        kind = next(kind for parse, kind in _KINDS if parse(name) is not None)
        try:
            record = parse_record(self._objects, name, kind, stored)
        except UNREADABLE:
            return False
        if isinstance(record, Lease):
            attempts = read_history(self._objects).attempts.known
            return all(attempt.number <= record.attempt for attempt in attempts)
        return True

    def _is_own_run_file(self, stored: Versioned) -> bool:
        try:
            info = RunInfo.parse(
                stored.value, self._run.uri / RUN_FILE, RecordLocation(None, RUN_FILE)
            )
        except UNREADABLE:
            return False
        ids = run_ids(self._run)
        return not ids or info.id in ids
