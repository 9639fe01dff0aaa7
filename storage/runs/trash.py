"""Soft deletion of steps: a tombstone first, the bytes only after it has expired.

Every deletion, whoever asks, goes the same way:

    judge -> intent -> look who needs the step -> tombstone -> look again -> intent gone

Several may delete a step at a time, or one after another died: the later intent takes the place of
the earlier one, and the first tombstone is that of all.

- An **intent** is seen by those who are about to need the step, and by no list: a process that dies
  behind it has deleted nothing. Who is about to need a step, as a promotion is, writes a **hold**,
  then looks for intents and tombstones; a deletion writes its intent, then looks for holds and
  aliases. One of the two sees the other: no alias ever names a step that goes, whoever dies when.
- Those looks are made at once, in any order: a tombstone goes after its manifest, and only if
  nobody holds the step by then.
- The lease and the attempts are read with the aliases: the step that a live writer would resume
  from stays.
- A tombstone that a retention policy laid carries the policy, which is asked again about the
  history as it has become: by the pass itself, and once more before any bytes go.

What is seen late is lifted again. Removal begins by marking the tombstone, by compare-and-swap
against those who would lift it.
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
from cairn.storage.runs.records import (
    TRASH,
    Attempt,
    Lease,
    check_attempt,
    check_step,
    forget_durable,
    hold_file,
    hold_files,
    intent_file,
    judge_records,
    lifted_file,
    manifest_file,
    parse_hold_file,
    parse_intent_file,
    parse_lifted_file,
    parse_record,
    parse_trash_file,
    put_record,
    read_lease,
    read_record,
    read_records,
    step_dir,
    trash_file,
    write_record,
)
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.store import (
    Clock,
    FreeJson,
    Moment,
    ObjectStore,
    Record,
    Versioned,
    from_rfc3339,
    rfc3339,
    utc_now,
)

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
    "deletable_step",
    "delete_step",
    "end_removal",
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
"""How long a deleted step can be had back."""

ANNOUNCED_SECONDS: Final = 15 * 60.0
"""How long an intent or a hold counts: no process sleeps as long between two requests."""

StepKey = tuple[int, int]
"""(step, attempt)."""


class Tombstone(Record):
    """What `trash/<step>.<n>.json` says.

    Attributes:
        at: when the step was deleted, RFC 3339 in UTC.
        expires: from when on its bytes may go.
        by: who asked.
        reason: why.
        removing: its bytes are going; it can't be had back.
        removed: they are gone; the tombstone stays for as long as the step had overwritten another,
            which must not be listed in its place.
        policy: the retention policy that asked, if one did; see `RetentionPolicy.to_json`.
        judged: number of the newest attempt when the policy was asked.
    """

    FORMAT: ClassVar[str] = "cairn.tombstone"

    at: Moment
    expires: Moment
    by: str = ""
    reason: str = ""
    removing: bool = False
    policy: FreeJson | None = Field(default=None, exclude_if=lambda one: one is None)
    judged: int | None = Field(default=None, exclude_if=lambda one: one is None)
    removed: bool = Field(default=False, exclude_if=lambda one: not one)

    def is_due(self, now: datetime) -> bool:
        """Whether there are bytes that may go."""
        return not self.removed and (self.removing or self.has_expired(now))

    def has_expired(self, now: datetime) -> bool:
        """Whether the bytes may go."""
        return now >= from_rfc3339(self.expires)


class _Announcement(Record):
    """What somebody is about to do with a step; others heed it while it lasts.

    Attributes:
        at: since when, RFC 3339 in UTC.
        by: who.
        reason: why.
        token: unique to this one.
    """

    at: Moment
    by: str = ""
    reason: str = ""
    token: str

    def is_alive(self, now: datetime) -> bool:
        """Whether it may still be acted upon."""
        return now < from_rfc3339(self.at) + timedelta(seconds=ANNOUNCED_SECONDS)


class Intent(_Announcement):
    """What `trash/<step>.<n>.intent.json` says: somebody is about to delete the step."""

    FORMAT: ClassVar[str] = "cairn.intent"


class Hold(_Announcement):
    """What `trash/<step>.<n>.<token>.hold.json` says: somebody is about to need the step."""

    FORMAT: ClassVar[str] = "cairn.hold"


def read_tombstones(objects: ObjectStore) -> dict[StepKey, Tombstone]:
    """The tombstone of every deleted step, by (step, attempt).

    Raises:
        UnsupportedFormatError, CorruptionError: one can't be read.
    """
    names = {
        name: key for name in objects.list(TRASH) if (key := parse_trash_file(name)) is not None
    }
    found = read_records(objects, names, Tombstone.parse)
    return {names[name]: tombstone for name, tombstone in found.items()}


class RunUse(NamedTuple):
    """What of a run is in use, at one moment.

    Attributes:
        needs: who needs a step, by step: aliases that point to it, those who hold it.
        lease: as it is, alive or not.
        attempts: every attempt, by number.
        latest: the latest listed step, if a writer is alive.
        now: the moment.
    """

    needs: dict[StepKey, list[str]]
    lease: Lease | None
    attempts: list[Attempt]
    latest: int | None
    now: datetime

    @classmethod
    def of(cls, run: Run, now: datetime) -> "RunUse":
        """What is in use now. The lease is read before the attempts: a start makes them in turn."""
        needs: dict[StepKey, list[str]] = {}
        # Holds before aliases: one is let go of once the alias is there.
        for key, hold in _holds(run):
            if hold.is_alive(now):
                needs.setdefault(key, []).append(
                    f"{hold.by or 'somebody'}, who is to {hold.reason}"
                )
        for one in run.aliases.list():
            needs.setdefault((one.step, one.attempt), []).append(f"alias {one.alias}")
        lease, attempts = read_lease(run.objects), run.attempts()
        alive = lease is not None and lease.is_alive(now)
        return cls(needs, lease, attempts, run.latest_step() if alive else None, now)

    def of_step(self, info: StepInfo) -> list[str]:
        """Who needs a step: nobody, if it may be deleted."""
        uses = list(self.needs.get((info.step, info.attempt), ()))
        return uses + self._by_writer(info)

    def _by_writer(self, info: StepInfo) -> list[str]:
        """The run's live writer, if it would resume from the step."""
        lease = self.lease
        if info.state is not StepState.LISTED or lease is None or not lease.is_alive(self.now):
            return []
        if self.latest is not None and self.latest > info.step:
            return []
        for attempt in self.attempts:
            if attempt.number == lease.attempt != info.attempt and attempt.base_step < info.step:
                return []  # it began without the step
        return [
            f"the latest step of writer {lease.writer} (attempt {lease.attempt}), which holds "
            f"the run until {lease.expires}"
        ]


def deletable_step(run: Run, step: SupportsIndex, attempt: SupportsIndex | None = None) -> StepInfo:
    """The step that a deletion means: a listed one, or one that was set aside.

    Told from names alone, so that one whose manifest is damaged can be deleted too.

    Args:
        run: the run.
        step: its number.
        attempt: the attempt that saved it; None: the one that is listed.

    Raises:
        InvalidURIError: `step` or `attempt` is no number of one.
        StepNotFoundError: there is no such step, or it was deleted already.
        StepInFlightError: it is being written.
    """
    step, attempt = check_step(step), None if attempt is None else check_attempt(attempt)
    held = run.step_attempts().get(step)
    if attempt is None and held is None:
        return run.step(step)  # raises, unless it was published just now
    if held is not None and attempt in (None, held):
        return StepInfo(step, held, StepState.LISTED)
    assert attempt is not None
    deleted = run.objects.read(trash_file(step, attempt)) is not None
    if not deleted and run.objects.read(manifest_file(step, attempt)) is not None:
        return StepInfo(step, attempt, StepState.SET_ASIDE)
    found = [f"step {step} of attempt {held} listed"] if held is not None else []
    if deleted:
        run.objects.sync(trash_file(step, attempt))
        found.append("it in the trash already")
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
            found.append(f"step {step} of attempt {info.attempt} {info.state.value}")
    raise StepNotFoundError(
        "no such step",
        path=run.uri,
        expected=f"step {step} of attempt {attempt}, with a manifest",
        found=", ".join(found) or "none",
        next_step="Choose a listed step, or one that was set aside; collecting garbage removes "
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
    """Delete a step: it is listed no more, and its bytes go once the grace time is over.

    Deleting a deleted step gives the tombstone that it has. What the step is, is judged anew: only
    its number and its attempt are taken from `info`.

    Args:
        run: the run.
        info: one of its steps; `deletable_step` finds it.
        by: who asks.
        reason: why.
        grace: seconds during which it can be had back.
        needed_by: steps that stay and refer to its bytes.
        clock: tells the time.

    Raises:
        StepInUseError: aliases name the step, other steps need its bytes, the run's writer would
            resume from it, or somebody is about to promote it or to roll back to it; it stays as
            it was.
        StepInFlightError: it is being written.
        StepNotFoundError: there is no such step with a manifest.
        RunNotFoundError: the run was removed meanwhile, and another has begun in its place.
    """
    key = info.step, info.attempt
    now = clock()
    tombstone = Tombstone(
        at=rfc3339(now), expires=rfc3339(now + timedelta(seconds=grace)), by=by, reason=reason
    )
    run_id = run.id
    intent = declare(run, key, by=by, reason=reason, now=now)
    try:
        deleted = read_record(run.objects, trash_file(*key), Tombstone)
        if deleted is not None:
            run.objects.sync(trash_file(*key))
            return deleted[0]
        # By now: what the caller saw in flight may have become the step of a live writer.
        info = deletable_step(run, *key)
        _refuse_in_use(run, info, needed_by, clock)
        generation = lay_tombstone(run, key, tombstone)
        if isinstance(generation, Tombstone):
            return generation
        try:
            _refuse_in_use(run, info, (), clock)  # should we have slept longer than an intent lasts
        except BaseException:
            lift(run, key, generation)
            raise
        if run.id != run_id:  # as the records tell that were just read
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
    """Write that a step is about to be deleted, in place of what others have written of that.

    Returns:
        The generation of the intent. None: it is in the place of one that counts still. Then it
        stays until it ends by itself: who wrote the other may be about to lay the tombstone, and
        has no intent but this.
    """
    name = intent_file(*key)
    intent = Intent(at=rfc3339(now), by=by, reason=reason, token=secrets.token_hex(8))
    while True:
        known, generation = read_record(run.objects, name, Intent) or (None, None)
        with contextlib.suppress(PreconditionFailedError):  # somebody was faster
            written = _announce(run, name, intent, generation)
            return written if known is None or not known.is_alive(now) else None


def withdraw(run: Run, key: StepKey, generation: bytes | None) -> None:
    """Take an intent back that `declare` gave. Never raises: one that stays ends by itself."""
    if generation is not None:
        with contextlib.suppress(StorageError):
            run.objects.delete_if(intent_file(*key), generation=generation)


def _announce(run: Run, name: str, record: Intent | Hold, generation: bytes | None) -> bytes:
    """Write an intent or a hold; its generation. One that fails is taken back: others heed it.

    Raises:
        PreconditionFailedError: another one is there.
        StorageError: the store refuses.
    """
    try:
        return write_record(run.objects, name, record, generation=generation)[1]
    except PreconditionFailedError:
        raise
    except StorageError:
        if generation is None:  # else somebody may have no intent but this
            with contextlib.suppress(StorageError):  # it ends by itself
                stored = read_record(run.objects, name, type(record))
                if stored is not None and stored[0].token == record.token:
                    run.objects.delete_if(name, generation=stored[1])
        raise


@contextlib.contextmanager
def held(
    run: Run, key: StepKey, *, by: str, reason: str, beside: Callable[[], Any] | None = None
) -> Iterator[Any]:
    """Hold a step meanwhile: no deletion of it begins. Gives what `beside` gave.

    Args:
        run: the run.
        key: (step, attempt).
        by: who holds it.
        reason: what for, as in "who is to …".
        beside: called once the step is held, in the round that looks whether it is deleted.

    Raises:
        StepChangedError: it is deleted, or about to be.
    """
    hold = Hold(at=rfc3339(run.clock()), by=by, reason=reason, token=secrets.token_hex(8))
    name = hold_file(*key, hold.token)
    generation = _announce(run, name, hold, None)
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
        with contextlib.suppress(StorageError):  # one that stays ends by itself
            run.objects.delete_if(name, generation=generation)


def _holds(run: Run, within: str = TRASH) -> list[tuple[StepKey, Hold]]:
    names = {
        name: key for name in run.objects.list(within) if (key := parse_hold_file(name)) is not None
    }
    found = read_records(run.objects, names, Hold.parse)
    return [(names[name], hold) for name, hold in found.items()]


def _is_going(run: Run, key: StepKey, beside: Callable[[], Any] | None) -> tuple[bool, Any]:
    """Whether a step is deleted, about to be, or gone; for who has just begun to need it.

    Also what `beside` gives in the same round.

    At once, in whatever order the store answers. An intent goes only once the tombstone is there;
    who lays that looks for holds after it. A tombstone goes only once the manifest is gone, and
    nobody has held the step since: see `end_removal`.
    """
    objects = run.objects
    intent, tombstone, manifest, *result = objects.at_once(
        lambda: read_record(objects, intent_file(*key), Intent),
        lambda: objects.read(trash_file(*key)),
        lambda: objects.read(manifest_file(*key)),
        *([] if beside is None else [beside]),
    )
    declared = intent is not None and intent[0].is_alive(run.clock())
    is_going = declared or tombstone is not None or manifest is None
    return is_going, result[0] if result else None


def clear_announcements(run: Run, *, now: datetime) -> None:
    """Remove the intents and the holds of processes that died, and notes of steps that are gone."""
    for name in run.objects.list(TRASH):
        lifted = parse_lifted_file(name)
        if lifted is not None and run.objects.read(manifest_file(*lifted)) is None:
            run.objects.delete(name)
        kind = Intent if parse_intent_file(name) else Hold if parse_hold_file(name) else None
        found = None if kind is None else read_record(run.objects, name, kind)
        if found is None or found[0].is_alive(now):
            continue
        with contextlib.suppress(PreconditionFailedError):
            run.objects.delete_if(name, generation=found[1])


def lay_tombstone(run: Run, key: StepKey, tombstone: Tombstone) -> "bytes | Tombstone":
    """Its generation; of a step that is deleted already the tombstone that it has.

    Only for who has declared the intent, and has seen since that nobody needs the step.
    """
    name = trash_file(*key)
    try:
        return write_record(run.objects, name, tombstone, generation=None)[1]
    except PreconditionFailedError as exc:
        if not isinstance(exc.current, Versioned):
            raise
        run.objects.sync(name)
        return parse_record(run.objects, name, Tombstone, exc.current)


def lift(run: Run, key: StepKey, generation: bytes) -> None:
    """Take a tombstone back that was just laid, if it is still that one. Never raises.

    Where the store does not answer it stays, and the step can be undeleted.
    """
    with contextlib.suppress(StorageError):
        found = read_record(run.objects, trash_file(*key), Tombstone)
        if found is not None and found[1] == generation:
            _take_back(run, key, *found)


def _take_back(run: Run, key: StepKey, tombstone: Tombstone, generation: bytes) -> None:
    """Remove a tombstone that is still as last seen."""
    note_lifted(run, key, tombstone)
    run.objects.delete_if(trash_file(*key), generation=generation)


def note_lifted(run: Run, key: StepKey, tombstone: Tombstone) -> None:
    """Write down which tombstone of a step is taken back: else it would seem lost to who saw it."""
    put_record(run.objects, lifted_file(*key), tombstone)


def read_lifted(run: Run, keys: Iterable[StepKey]) -> dict[StepKey, Tombstone]:
    """The tombstone that was taken back last of each of these steps, if any was."""
    names = {lifted_file(*key): key for key in keys}
    found, _ = judge_records(run.objects, names, Tombstone.parse)
    return {names[name]: one for name, one in found.items()}


def undelete_step(run: Run, step: int, attempt: int) -> None:
    """Take a deletion back; the step is listed again if it counts.

    Raises:
        StepNotFoundError: the step is not deleted, or its bytes are going already.
    """
    key = trash_file(step, attempt)
    for _ in range(2):  # it can change once, when removal begins
        found = read_record(run.objects, key, Tombstone)
        if found is None:
            raise StepNotFoundError(
                "no such deleted step",
                path=run.uri / key,
                expected=f"a tombstone of step {step}, attempt {attempt}",
                found="none",
                next_step="See the run's steps: it was never deleted, or is gone.",
            )
        if found[0].removing:
            break
        try:
            _take_back(run, (step, attempt), *found)
        except PreconditionFailedError:
            continue
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
    """Mark an expired tombstone, from when on the step can't be had back.

    Args:
        run: the run.
        key: (step, attempt).
        now: the present moment.
        keeps: whether the policy that laid a tombstone keeps the step by now.

    Returns:
        False if the step stays: it was undeleted, has not expired, or somebody needs it or its
        policy keeps it, in which cases the tombstone is lifted.
    """
    name = trash_file(*key)
    found = read_record(run.objects, name, Tombstone)
    if found is None:
        return False
    tombstone, generation = found
    if tombstone.removing:
        return True
    if not tombstone.has_expired(now):
        return False
    use = RunUse.of(run, now)  # after the tombstone, which was there before
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
    """What becomes of the tombstone of a step whose bytes are gone.

    Whoever holds the step may have seen its manifest, which was there when they looked, and has yet
    to see the tombstone: it stays for them, until the next collection.

    Args:
        run: the run.
        key: (step, attempt).
        stays: without it, what the step had overwritten would be listed again.
        now: the present moment.
    """
    name = trash_file(*key)
    if not stays:
        if any(hold.is_alive(now) for _, hold in _holds(run, hold_files(*key))):
            return
        forget_durable(run.objects, key)  # nothing will tell that it was deleted
        run.objects.delete(name)
        return
    found = read_record(run.objects, name, Tombstone)
    if found is None:
        return
    removed = found[0].model_copy(update={"removed": True})
    with contextlib.suppress(PreconditionFailedError):  # another collector was faster
        write_record(run.objects, name, removed, generation=found[1], same_is_success=False)


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
