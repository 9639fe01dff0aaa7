"""Soft deletion of steps: a tombstone first, the bytes only after it has expired.

Every deletion has these steps:

    judge -> intent -> check who needs the step -> tombstone -> check again -> withdraw the intent

Several processes may delete a step at the same time, or one may go on after another died: a later
intent replaces the earlier one, and the first tombstone counts for all.

- An **intent** is seen by processes that are about to need the step, but by no listing: a process
  that dies after writing it has deleted nothing. A process that is about to need a step, such as a
  promotion, writes a **hold**, then looks for intents and tombstones. A deletion writes its intent,
  then looks for holds and aliases. At least one of the two sees the other, so no alias ever names a
  step that is removed, whichever process dies at any moment.
- The requests that look for them are sent at once, in any order. That is safe because a tombstone
is removed only after its manifest, and only if there is no hold of the step then. - The lease and
the attempts are read with the aliases: the step that a live writer would resume
  from stays.
- A tombstone that a retention policy caused contains the policy. The policy is applied again to the
later history: by the pass itself, and once more before any bytes are removed.

If a use is noticed late, the tombstone is withdrawn. Removal begins by marking the tombstone, by
compare-and-swap, so that it can't be withdrawn at the same time.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, NamedTuple, SupportsIndex

from pydantic import Field

from cairn.storage.errors import (
    PreconditionFailedError,
    RunNotFoundError,
    StepChangedError,
    StepInFlightError,
    StepInUseError,
    StepNotFoundError,
    StorageError,
)
from cairn.storage.runs.lease import Lease, forget_durable, read_lease
from cairn.storage.runs.records.attempts import Attempt
from cairn.storage.runs.records.layout import (
    TRASH,
    check_attempt,
    check_step,
    hold_file,
    hold_files,
    intent_file,
    lifted_file,
    manifest_file,
    parse_hold_file,
    parse_intent_file,
    parse_lifted_file,
    parse_trash_file,
    step_dir,
    trash_file,
)
from cairn.storage.runs.records.placed import (
    judge_records,
    parse_record,
    put_record,
    read_record,
    read_records,
    write_record,
)
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.store.bounds import FreeJson
from cairn.storage.store.clock import Clock, Moment, from_rfc3339, rfc3339, utc_now
from cairn.storage.store.objects import ObjectStore, Versioned
from cairn.storage.store.records import Record

__all__ = [
    "GRACE_SECONDS",
    "Hold",
    "Intent",
    "RunUse",
    "StepKey",
    "Tombstone",
    "begin_removal",
    "clear_announcements",
    "declare",
    "delete_step",
    "end_removal",
    "find_deletable_step",
    "held",
    "lay_tombstone",
    "lift",
    "note_lifted",
    "read_lifted",
    "read_tombstones",
    "undelete_step",
    "withdraw",
]

GRACE_SECONDS: Final = 7 * 24 * 3600.0
"""Seconds for which a deleted step can be undeleted."""

ANNOUNCED_SECONDS: Final = 15 * 60.0
"""Seconds for which an intent or a hold counts; no process pauses so long between requests."""

StepKey = tuple[int, int]
"""Key of a step: (step, attempt)."""


class Tombstone(Record):
    """Content of `trash/<step>.<n>.json`.

    Attributes:
        at: time of the deletion, RFC 3339 in UTC.
        expires: time from which its bytes may be removed, RFC 3339 in UTC.
        by: name of who deleted it.
        reason: reason that they gave.
        removing: whether its bytes are being removed, so that it can't be undeleted.
        removed: whether its bytes are removed. The tombstone then stays while a step exists that
            this one had overwritten, and that must not be listed in its place.
        policy: the retention policy that deleted it, see `RetentionPolicy.to_json`; None: no
            policy did.
        judged: number of the newest attempt when the policy was applied.
    """

    FORMAT: ClassVar[str] = "cairn.tombstone"

    at: Moment
    expires: Moment
    by: str = ""
    reason: str = ""
    removing: bool = False
    policy: FreeJson | None = Field(default=None, exclude_if=lambda field: field is None)
    judged: int | None = Field(default=None, exclude_if=lambda field: field is None)
    removed: bool = Field(default=False, exclude_if=lambda field: not field)

    def is_due(self, now: datetime) -> bool:
        """Return True if its bytes may be removed and are not removed yet."""
        return not self.removed and (self.removing or self.has_expired(now))

    def has_expired(self, now: datetime) -> bool:
        """Return True if the grace time is over."""
        return now >= from_rfc3339(self.expires)


class _Announcement(Record):
    """Announcement that a process is about to delete or use a step; valid for a limited time.

    Attributes:
        at: time of writing, RFC 3339 in UTC.
        by: name of who wrote it.
        reason: purpose, for messages.
        token: unique text of this announcement.
    """

    at: Moment
    by: str = ""
    reason: str = ""
    token: str

    def is_alive(self, now: datetime) -> bool:
        """Return True until `ANNOUNCED_SECONDS` after it was written."""
        return now < from_rfc3339(self.at) + timedelta(seconds=ANNOUNCED_SECONDS)


class Intent(_Announcement):
    """Content of `trash/<step>.<n>.intent.json`: a process is about to delete the step."""

    FORMAT: ClassVar[str] = "cairn.intent"


class Hold(_Announcement):
    """Content of `trash/<step>.<n>.<token>.hold.json`: a process is about to use the step."""

    FORMAT: ClassVar[str] = "cairn.hold"


def read_tombstones(objects: ObjectStore) -> dict[StepKey, Tombstone]:
    """Return the tombstone of every deleted step, by (step, attempt).

    Raises:
        UnsupportedFormatError, CorruptionError: a tombstone can't be read.
    """
    names = {
        name: key for name in objects.list(TRASH) if (key := parse_trash_file(name)) is not None
    }
    tombstones = read_records(objects, names, Tombstone.parse)
    return {names[name]: tombstone for name, tombstone in tombstones.items()}


class RunUse(NamedTuple):
    """Uses of a run's steps at one moment.

    Attributes:
        needs: step -> its users: the aliases that point to it, and the writers of holds.
        lease: the lease, expired or not; None if there is none.
        attempts: every attempt, by number.
        latest: the latest listed step, if a writer is alive; else None.
        now: time of reading.
    """

    needs: dict[StepKey, list[str]]
    lease: Lease | None
    attempts: list[Attempt]
    latest: int | None
    now: datetime

    @classmethod
    def of(cls, run: Run, now: datetime) -> "RunUse":
        """Return the present uses; reads the lease before the attempts, as a start writes them."""
        needs: dict[StepKey, list[str]] = {}
        # Holds before aliases: a promotion removes its hold once the alias is there.
        for key, hold in _holds(run):
            if hold.is_alive(now):
                needs.setdefault(key, []).append(
                    f"{hold.by or 'somebody'}, who is to {hold.reason}"
                )
        for alias in run.aliases.list():
            needs.setdefault((alias.step, alias.attempt), []).append(f"alias {alias.alias}")
        lease, attempts = read_lease(run.objects), run.attempts()
        alive = lease is not None and lease.is_alive(now)
        return cls(needs, lease, attempts, run.latest_step() if alive else None, now)

    def of_step(self, info: StepInfo) -> list[str]:
        """Return the users of a step; empty if it may be deleted."""
        uses = list(self.needs.get((info.step, info.attempt), ()))
        return uses + self._by_writer(info)

    def _by_writer(self, info: StepInfo) -> list[str]:
        """Return the run's live writer if it would resume from the step; else nothing."""
        lease = self.lease
        if info.state is not StepState.LISTED or lease is None or not lease.is_alive(self.now):
            return []
        if self.latest is not None and self.latest > info.step:
            return []
        for attempt in self.attempts:
            if attempt.number == lease.attempt != info.attempt and attempt.base_step < info.step:
                return []  # its attempt does not keep the step
        return [
            f"the latest step of writer {lease.writer} (attempt {lease.attempt}), which holds "
            f"the run until {lease.expires}"
        ]


def find_deletable_step(
    run: Run, step: SupportsIndex, attempt: SupportsIndex | None = None
) -> StepInfo:
    """Return the step to delete: a listed one, or one that was superseded.

    Only names are read, so that a step with a damaged manifest can be deleted too.

    Args:
        run: the run.
        step: number of the step.
        attempt: the attempt that saved it; None: the listed one.

    Raises:
        InvalidURIError: `step` or `attempt` is not a valid number.
        StepNotFoundError: there is no such step, or it was deleted already.
        StepInFlightError: the step is being written.
    """
    step, attempt = check_step(step), None if attempt is None else check_attempt(attempt)
    listed = run.step_attempts().get(step)
    if attempt is None and listed is None:
        return run.step(step)  # raises, unless it was published just now
    if listed is not None and attempt in (None, listed):
        return StepInfo(step, listed, StepState.LISTED)
    assert attempt is not None
    deleted = run.objects.read(trash_file(step, attempt)) is not None
    if not deleted and run.objects.read(manifest_file(step, attempt)) is not None:
        return StepInfo(step, attempt, StepState.SUPERSEDED)
    states = [f"step {step} of attempt {listed} listed"] if listed is not None else []
    if deleted:
        run.objects.sync(trash_file(step, attempt))
        states.append("it in the trash already")
    for info in run.unpublished():
        if info.step == step:
            if info.attempt == attempt and info.state is StepState.IN_FLIGHT:
                raise StepInFlightError(
                    "the step is being saved",
                    path=run.step_uri(info),
                    expected="a complete step",
                    found="a save in flight",
                    next_step="Try again once it is done.",
                )
            states.append(f"step {step} of attempt {info.attempt} {info.state.value}")
    raise StepNotFoundError(
        "no such step",
        path=run.uri,
        expected=f"step {step} of attempt {attempt} with a manifest",
        found=", ".join(states) or "none",
        next_step="Choose a listed step, or one that was superseded; collecting garbage removes "
        "abandoned ones.",
    )


def delete_step(
    run: Run,
    info: StepInfo,
    *,
    by: str,
    reason: str = "",
    grace: float = GRACE_SECONDS,
    needed_by: Iterable[StepKey] = (),
    clock: Clock = utc_now,
) -> Tombstone:
    """Delete a step: it is no longer listed, and its bytes are removed after the grace time.

    Deleting a deleted step returns its tombstone. Only the number and the attempt of `info` are
    used; the step's state is read again.

    Args:
        run: the run.
        info: a step of the run, such as `find_deletable_step` returns.
        by: the caller's name.
        reason: reason of the deletion, for the tombstone.
        grace: seconds during which it can be undeleted.
        needed_by: other steps that stay and need its bytes.
        clock: returns the current time in UTC.

    Raises:
        StepInUseError: aliases name the step, other steps need its bytes, the run's writer would
            resume from it, or a promotion or rollback to it is running; nothing is changed.
        StepInFlightError: the step is being written.
        StepNotFoundError: there is no such step with a manifest.
        RunNotFoundError: the run was removed meanwhile, and another has begun in its place.
    """
    key = info.step, info.attempt
    now = clock()
    tombstone = Tombstone(
        at=rfc3339(now), expires=rfc3339(now + timedelta(seconds=grace)), by=by, reason=reason
    )
    run_id = run.id
    # The intent comes before the look for holds and aliases: one of two processes sees the other.
    intent = declare(run, key, by=by, reason=reason, now=now)
    try:
        deleted = read_record(run.objects, trash_file(*key), Tombstone)
        if deleted is not None:
            # Its writer may have died before the fsync.
            run.objects.sync(trash_file(*key))
            return deleted[0]
        # Judged again: the step that the caller saw in flight may be published by now.
        info = find_deletable_step(run, *key)
        _refuse_in_use(run, info, needed_by, clock)
        generation = lay_tombstone(run, key, tombstone)
        if isinstance(generation, Tombstone):
            return generation
        try:
            # In case this process paused for longer than an intent lasts.
            _refuse_in_use(run, info, (), clock)
        except BaseException:
            lift(run, key, generation)
            raise
        if run.id != run_id:  # parsing the records has refreshed the id
            with contextlib.suppress(StorageError):
                run.objects.delete_if(trash_file(*key), generation=generation)
            raise RunNotFoundError(
                "the run was removed, and another begun",
                path=run.uri,
                expected=f"the run with id {run_id!r}",
                found=f"the one with id {run.id!r}",
                next_step="Look at the run that is there now; nothing of it was deleted.",
            )
    finally:
        withdraw(run, key, intent)
    return tombstone


def declare(run: Run, key: StepKey, *, by: str, reason: str, now: datetime) -> bytes | None:
    """Write the intent to delete a step, replacing any other intent.

    Returns:
        The generation of the intent, for `withdraw`. None if it replaced an intent that is still
        valid: it then stays until it expires, because the writer of the other intent, which may be
        about to write the tombstone, has only this intent now.
    """
    name = intent_file(*key)
    intent = Intent(at=rfc3339(now), by=by, reason=reason, token=secrets.token_hex(8))
    while True:
        previous, generation = read_record(run.objects, name, Intent) or (None, None)
        with contextlib.suppress(PreconditionFailedError):  # another process was faster
            written = _announce(run, name, intent, generation)
            return written if previous is None or not previous.is_alive(now) else None


def withdraw(run: Run, key: StepKey, generation: bytes | None) -> None:
    """Delete the intent whose generation `declare` returned.

    It never raises: an intent that stays will expire.
    """
    if generation is not None:
        with contextlib.suppress(StorageError):
            run.objects.delete_if(intent_file(*key), generation=generation)


def _announce(run: Run, name: str, record: Intent | Hold, generation: bytes | None) -> bytes:
    """Write an intent or a hold and return its generation; if that fails, delete it again.

    Raises:
        PreconditionFailedError: there is another intent or hold of this name.
        StorageError: the store refuses.
    """
    try:
        return write_record(run.objects, name, record, generation=generation)[1]
    except PreconditionFailedError:
        raise
    except StorageError:
        if generation is None:  # otherwise another process may depend on this intent
            with contextlib.suppress(StorageError):  # otherwise it expires
                stored = read_record(run.objects, name, type(record))
                if stored is not None and stored[0].token == record.token:
                    _retract(run, name, stored[1])
        raise


def _retract(run: Run, name: str, generation: bytes) -> None:
    """Delete an intent if it is unchanged, or a hold, whose name nobody else writes.

    Raises:
        PreconditionFailedError: there is another intent.
    """
    if parse_hold_file(name) is not None:
        run.objects.delete(name)
    else:
        run.objects.delete_if(name, generation=generation)


@contextlib.contextmanager
def held(
    run: Run, key: StepKey, *, by: str, reason: str, beside: Callable[[], Any] | None = None
) -> Iterator[Any]:
    """Mark a step as in use within the context, by a hold; yield the result of `beside`.

    No deletion of the step begins meanwhile.

    Args:
        run: the run.
        key: (step, attempt).
        by: the caller's name.
        reason: purpose, for messages; it completes "NAME is to …".
        beside: function to call once the hold is written, concurrently with the check for a
            deletion.

    Raises:
        StepChangedError: the step is deleted, or about to be.
    """
    hold = Hold(at=rfc3339(run.clock()), by=by, reason=reason, token=secrets.token_hex(8))
    name = hold_file(*key, hold.token)
    # The hold comes before the look for intents: one of two processes sees the other.
    _announce(run, name, hold, None)
    try:
        is_going, result = _is_going(run, key, beside)
        if is_going:
            raise StepChangedError(
                "the step was deleted meanwhile",
                path=f"{run.uri}/{step_dir(key[1], key[0])}",
                expected="a step that stays",
                found="its deletion",
                next_step="Choose another step, or undelete this one first.",
            )
        yield result
    finally:
        with contextlib.suppress(StorageError):  # a hold that stays expires
            run.objects.delete(name)


def _holds(run: Run, within: str = TRASH) -> list[tuple[StepKey, Hold]]:
    names = {
        name: key for name in run.objects.list(within) if (key := parse_hold_file(name)) is not None
    }
    holds = read_records(run.objects, names, Hold.parse)
    return [(names[name], hold) for name, hold in holds.items()]


def _is_going(run: Run, key: StepKey, beside: Callable[[], Any] | None) -> tuple[bool, Any]:
    """Return whether a step is deleted, about to be, or gone, and the result of `beside`.

    The requests are sent at once, in any order. That is safe: an intent is withdrawn only once the
    tombstone exists, and the deletion looks for holds again after it has written the tombstone. A
    tombstone is removed only once the manifest is gone and there is no hold, see `end_removal`.
    """
    objects = run.objects
    intent, tombstone, manifest, *result = objects.gather(
        lambda: read_record(objects, intent_file(*key), Intent),
        lambda: objects.read(trash_file(*key)),
        lambda: objects.read(manifest_file(*key)),
        *([] if beside is None else [beside]),
    )
    declared = intent is not None and intent[0].is_alive(run.clock())
    is_going = declared or tombstone is not None or manifest is None
    return is_going, result[0] if result else None


def clear_announcements(run: Run, *, now: datetime) -> None:
    """Remove expired intents and holds, and copies of withdrawn tombstones of removed steps."""
    for name in run.objects.list(TRASH):
        lifted = parse_lifted_file(name)
        if lifted is not None and run.objects.read(manifest_file(*lifted)) is None:
            run.objects.delete(name)
        kind = Intent if parse_intent_file(name) else Hold if parse_hold_file(name) else None
        stored = None if kind is None else read_record(run.objects, name, kind)
        if stored is None or stored[0].is_alive(now):
            continue
        with contextlib.suppress(PreconditionFailedError):
            _retract(run, name, stored[1])


def lay_tombstone(run: Run, key: StepKey, tombstone: Tombstone) -> "bytes | Tombstone":
    """Write the tombstone; return its generation, or the existing tombstone of a deleted step.

    Call it only after writing the intent and then finding no user of the step.
    """
    name = trash_file(*key)
    try:
        return write_record(run.objects, name, tombstone, generation=None)[1]
    except PreconditionFailedError as exc:
        if not isinstance(exc.current, Versioned):
            raise
        # Its writer may have died before the fsync.
        run.objects.sync(name)
        return parse_record(run.objects, name, Tombstone, exc.current)


def lift(run: Run, key: StepKey, generation: bytes) -> None:
    """Delete a tombstone that was just written, if it is unchanged. Never raises.

    If the store does not answer, the tombstone stays, and the step can be undeleted.
    """
    with contextlib.suppress(StorageError):
        stored = read_record(run.objects, trash_file(*key), Tombstone)
        if stored is not None and stored[1] == generation:
            _take_back(run, key, *stored)


def _take_back(run: Run, key: StepKey, tombstone: Tombstone, generation: bytes) -> None:
    """Delete a tombstone if its generation is unchanged, and keep a copy of it."""
    note_lifted(run, key, tombstone)
    run.objects.delete_if(trash_file(*key), generation=generation)


def note_lifted(run: Run, key: StepKey, tombstone: Tombstone) -> None:
    """Keep a copy of a tombstone that is withdrawn; without it, the tombstone would seem lost."""
    put_record(run.objects, lifted_file(*key), tombstone)


def read_lifted(run: Run, keys: Iterable[StepKey]) -> dict[StepKey, Tombstone]:
    """Return the last withdrawn tombstone of each of these steps that has one."""
    names = {lifted_file(*key): key for key in keys}
    tombstones, _ = judge_records(run.objects, names, Tombstone.parse)
    return {names[name]: tombstone for name, tombstone in tombstones.items()}


def undelete_step(run: Run, step: int, attempt: int) -> None:
    """Undo a deletion; the step is listed again unless it is superseded.

    Raises:
        StepNotFoundError: the step is not deleted, or its bytes are being removed already, or gone.
    """
    key = trash_file(step, attempt)
    for _ in range(2):  # the tombstone can change once, when removal begins
        stored = read_record(run.objects, key, Tombstone)
        if stored is None:
            raise StepNotFoundError(
                "no such deleted step",
                path=run.uri / key,
                expected=f"a tombstone of step {step}, attempt {attempt}",
                found="none",
                next_step="See the run's steps: it was never deleted, or is gone.",
            )
        if stored[0].removing:
            break
        try:
            _take_back(run, (step, attempt), *stored)
        except PreconditionFailedError:
            continue
        if not run.objects.existing([manifest_file(step, attempt)]):
            break  # a collection was faster, and has removed the tombstone as well
        return
    raise StepNotFoundError(
        "too late to undelete",
        path=run.uri / key,
        expected="a step whose bytes are still there",
        found="a removal under way",
        next_step="Restore it from a fork or an export.",
    )


def begin_removal(
    run: Run, key: StepKey, *, now: datetime, keeps: Callable[[Tombstone], bool]
) -> bool:
    """Mark an expired tombstone, so that the step can't be undeleted any more.

    Args:
        run: the run.
        key: (step, attempt).
        now: the present time.
        keeps: returns True if the policy that wrote the tombstone keeps the step now.

    Returns:
        True if the tombstone is marked. False if the step stays: it was undeleted, its tombstone
        has not expired, it has a user, or its policy keeps it. In the last two cases the tombstone
        is withdrawn.
    """
    name = trash_file(*key)
    stored = read_record(run.objects, name, Tombstone)
    if stored is None:
        return False
    tombstone, generation = stored
    if tombstone.removing:
        return True
    if not tombstone.has_expired(now):
        return False
    # Read after the tombstone: a later hold or promotion sees the tombstone and gives up.
    use = RunUse.of(run, now)
    try:
        if key in use.needs or keeps(tombstone):
            _take_back(run, key, tombstone, generation)
            return False
        marked = tombstone.model_copy(update={"removing": True})
        write_record(run.objects, name, marked, generation=generation)
    except PreconditionFailedError:
        return False  # undeleted meanwhile
    return True


def end_removal(run: Run, key: StepKey, *, stays: bool, now: datetime) -> None:
    """Delete the tombstone of a step whose bytes are gone, or mark it as `removed`.

    If there is a hold, the tombstone stays until the next collection: the holding process may have
    read the manifest before it was removed, and may not have looked for the tombstone yet.

    Args:
        run: the run.
        key: (step, attempt).
        stays: whether the tombstone must stay, because a step that this one had overwritten would
            be listed again without it.
        now: the present time.
    """
    name = trash_file(*key)
    if not stays:
        if any(hold.is_alive(now) for _, hold in _holds(run, hold_files(*key))):
            return
        # Otherwise the step would seem lost, since nothing would show its deletion.
        forget_durable(run.objects, key)
        run.objects.delete(intent_file(*key))  # in a bucket that of every deletion has left a grave
        run.objects.delete(name)
        return
    stored = read_record(run.objects, name, Tombstone)
    if stored is None:
        return
    removed = stored[0].model_copy(update={"removed": True})
    with contextlib.suppress(PreconditionFailedError):  # another collection was faster
        write_record(run.objects, name, removed, generation=stored[1], same_is_success=False)


def _refuse_in_use(run: Run, info: StepInfo, needed_by: Iterable[StepKey], clock: Clock) -> None:
    uses = RunUse.of(run, clock()).of_step(info)
    uses += [f"step {step} of attempt {attempt}" for step, attempt in sorted(needed_by)]
    if uses:
        raise StepInUseError(
            "the step is in use",
            path=run.step_uri(info),
            expected="a step that nobody needs",
            found=", ".join(uses),
            next_step="Move or delete the aliases, or delete the steps that need it, first. "
            "Delete it once a later step is saved or that job has ended, if it is a job's.",
        )
