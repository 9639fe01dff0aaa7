"""The lease, which says who may write a run, and the attempts that begin under it.

A lease is one object, changed by compare-and-swap. It keeps two writers from beginning attempts at
the same time. It does not decide which steps count: that follows from the attempts alone (their
numbers are the fencing tokens), whatever the clocks say.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from cairn.storage.errors import FencedError, LeaseHeldError, PreconditionFailedError, StorageError
from cairn.storage.runs.records.attempts import (
    Attempt,
    Begun,
    Kept,
    create_attempt,
    ensure_newest,
    free_number,
    is_begun,
    list_attempts,
    newest_number,
    saved_steps,
)
from cairn.storage.runs.records.layout import LEASE_FILE, MAX_NUMBER
from cairn.storage.runs.records.placed import read_record, write_record
from cairn.storage.store.clock import Clock, Moment, from_rfc3339, rfc3339, utc_now
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.records import Record
from cairn.storage.store_checks.probe import Probe, begin_probe

logger = logging.getLogger("cairn.save")

__all__ = [
    "CLOCK_MARGIN_SECONDS",
    "DEAD_AFTER_SECONDS",
    "LEASE_TTL_SECONDS",
    "Held",
    "Lease",
    "Seen",
    "Started",
    "begin_attempt",
    "forget_durable",
    "holds_lease",
    "interrupted_start",
    "is_dead",
    "note_begun",
    "note_durable",
    "read_lease",
    "release",
    "renew",
    "start_attempt",
]

LEASE_TTL_SECONDS = 60.0
"""Seconds until a lease expires unless it is renewed."""

DEAD_AFTER_SECONDS = 24 * 3600.0
"""Seconds after a lease's expiry from which its writer counts as dead, not only paused."""

CLOCK_MARGIN_SECONDS = 15.0
"""Largest expected difference of two clocks in seconds; writers wait this long after an expiry."""

# Each failed try means that another process changed the lease. This many failures in a row
# come from a misconfiguration, such as many processes with one writer id.
_CAS_TRIES = 50

Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]


class Lease(Record):
    """Record of who may start the next attempt without waiting.

    Attributes:
        writer: id of the writer that holds the lease.
        attempt: the attempt for which it was taken.
        expires: time of expiry, RFC 3339 in UTC.
        released: whether the writer gave it back, so that any writer may take it at once.
        instance: id of the process, among those that share the writer's id.
        durable: (step, attempt) that was last reported durable. A start keeps that step even if the
            store shows it a stale listing of manifests.
        begun: the newest attempt that is known to exist; None before the first.
    """

    FORMAT: ClassVar[str] = "cairn.lease"

    writer: str
    attempt: Number
    expires: Moment
    released: bool = False
    instance: str = ""
    durable: tuple[Number, Number] | None = None
    begun: Begun | None = Field(default=None, exclude_if=lambda field: field is None)

    def is_alive(self, now: datetime) -> bool:
        """Return True until the lease is released or expired for `CLOCK_MARGIN_SECONDS`."""
        margin = timedelta(seconds=CLOCK_MARGIN_SECONDS)
        return not self.released and now < from_rfc3339(self.expires) + margin


def is_dead(lease: Lease, now: datetime) -> bool:
    """Return True if the lease expired so long ago that its writer counts as dead."""
    return now >= from_rfc3339(lease.expires) + timedelta(seconds=DEAD_AFTER_SECONDS)


def read_lease(objects: ObjectStore) -> Lease | None:
    """Return the run's lease, expired or not; None if there is none.

    Raises:
        UnsupportedFormatError, CorruptionError: the lease can't be read.
    """
    stored = read_record(objects, LEASE_FILE, Lease)
    return None if stored is None else stored[0]


class Seen(NamedTuple):
    """State of a run as read before its lease is taken.

    It is valid only while the lease is unchanged: a writer that publishes a step or begins an
    attempt changes the lease before it reports that.

    Attributes:
        lease: the lease that was read; None: there was neither a lease nor an attempt.
        generation: generation of the lease's record.
        newest: the newest attempt, (0, -1) if there is none.
        highest: the highest number that an attempt or a folder has.
        kept: the last step to keep.
    """

    lease: Lease | None
    generation: bytes | None
    newest: Begun
    highest: int
    kept: Kept


class Held(NamedTuple):
    """Lease as last written, with the generation of that write."""

    lease: Lease
    generation: bytes


class Started(NamedTuple):
    """Attempt that has begun.

    Attributes:
        attempt: the attempt.
        held: the lease that was taken for it.
        goes_back: True if it does not keep the step that the lease names as durable.
        probe: check of the store's promises; nothing written counts before it has passed.
    """

    attempt: Attempt
    held: Held
    goes_back: bool
    probe: Probe


def begin_attempt(
    objects: ObjectStore,
    *,
    writer: str,
    base_step: Kept | Callable[[], Kept],
    clock: Clock = utc_now,
    ttl: float = LEASE_TTL_SECONDS,
    instance: str = "",
    ends: int | None = None,
) -> Attempt:
    """Start an attempt as `start_attempt` does, record it in the lease, and return it."""
    started = start_attempt(
        objects,
        writer=writer,
        base_step=base_step,
        clock=clock,
        ttl=ttl,
        instance=instance,
        ends=ends,
    )
    try:
        started.probe.ensure_finished()
    except BaseException:
        with contextlib.suppress(StorageError):
            release(objects, started.attempt, clock=clock)
        raise
    with contextlib.suppress(StorageError):  # the attempt has begun: its own record shows it
        note_begun(objects, started)
    return started.attempt


def start_attempt(
    objects: ObjectStore,
    *,
    writer: str,
    base_step: Kept | Callable[[], Kept],
    overwrites: int | None = None,
    clock: Clock = utc_now,
    ttl: float = LEASE_TTL_SECONDS,
    instance: str = "",
    before: Attempt | None = None,
    seen: Seen | None = None,
    ends: int | None = None,
) -> Started:
    """Take the lease and create the next attempt; check the store's promises meanwhile.

    The same writer takes its own lease over at once, since a restarted job must not wait for an
    expiry. Another writer has to wait until the lease has expired, plus the clock margin.

    The attempt is created only once the store has passed the whole check; with `seen`, once the
    check has shown exclusive creation: an attempt that keeps every step does no harm before the
    rest is known.

    Args:
        objects: the run's objects.
        writer: id of the writer, the same over restarts.
        base_step: the last step to keep, with its attempt if known; -1 for none. A function is
            called while the lease is held, so that it sees all that an earlier writer published. It
            may be called again.
        overwrites: the step that this attempt is begun to overwrite, and which it saves first;
            None: no step.
        clock: returns the current time in UTC.
        ttl: how long the lease lasts unless renewed, in seconds.
        instance: id of this process, among those with the same writer id.
        before: the attempt that this process has held so far. It must still be the newest: a
            process that was paused and wakes up must not take the run from its own successor.
        seen: the run's state as just read, which replaces `base_step` and further requests; not
            allowed with `before`.
        ends: an attempt whose lease is taken although its writer is alive, because a person asked
            for it.

    Returns:
        The argument for `note_begun`. If this process dies before it calls `note_begun`, only the
        attempt's own record shows the attempt.

    Raises:
        LeaseHeldError: another writer holds the lease.
        FencedError: the run was taken over since `before`.
        UnsupportedFormatError, CorruptionError: the lease or the record of an attempt is damaged or
            missing, so that nothing decides which steps count.
        StoreCheckError: the store does not keep the promises that runs depend on.
    """
    probe = begin_probe(objects.uri)  # runs while the lease is taken
    saved = saved_steps(objects) if seen is None else None
    number = free_number(objects, saved or ()) if seen is None else seen.highest + 1
    while True:
        if before is not None:
            ensure_newest(objects, before)
        attempt = Attempt(number, -1, writer, rfc3339(clock()), instance)
        stored_lease = None if seen is None else _take_as_seen(objects, attempt, clock, ttl, seen)
        if stored_lease is None:
            seen = None
            taking = _taking(objects, attempt, clock, ttl, before, ends)
            stored_lease = _change(objects, taking)
            assert stored_lease is not None
        # The lease never goes back to a lower attempt, so it may name a higher one than was asked
        # for.
        lease = stored_lease.lease
        number = lease.attempt
        try:
            if before is not None:
                ensure_newest(objects, before)
            if seen is not None:
                # The lease did not change since `seen` was read, so nothing was published or begun
                # since.
                previous, kept = seen.newest, seen.kept
            else:
                saved = saved_steps(objects) if saved is None else saved
                newest = list_attempts(objects, lease.begun, saved)[-1:]
                previous = (newest[0].number, newest[0].base_step) if newest else (0, -1)
                # Asked only once the lease is taken: an earlier writer that publishes a step after
                # this finds the lease gone, and does not report that step as saved.
                kept = base_step() if callable(base_step) else base_step
            keep, keeper = kept if isinstance(kept, tuple) else (kept, None)
            if seen is None:
                probe.ensure_passed()
            else:  # it keeps every step, so it is harmless while the probe runs
                probe.ensure_exclusive_create()
            begun = create_attempt(
                objects,
                replace(
                    attempt,
                    number=number,
                    base_step=keep,
                    at=rfc3339(clock()),
                    previous=previous,
                    base_attempt=keeper,
                    overwrites=overwrites,
                ),
            )
            if begun is not None:
                probe.ensure_passed()
                # An attempt that goes back keeps no step above its base.
                goes_back = lease.durable is not None and lease.durable[0] > begun.base_step
                return Started(begun, stored_lease, goes_back, probe)
        except BaseException:
            with contextlib.suppress(StorageError):  # else the lease expires by itself
                release(objects, replace(attempt, number=number), clock=clock)
            raise
        number += 1  # another start was first and may have saved: ask again for the step to keep
        seen = None


def note_begun(objects: ObjectStore, started: Started) -> Held | None:
    """Record in the lease that an attempt has begun; return the lease.

    None if another attempt holds the lease by now.
    """

    def durable(now: Lease) -> tuple[int, int] | None:
        return None if started.goes_back else now.durable

    return _note(objects, started.attempt, durable, started.held)


def interrupted_start(objects: ObjectStore, before: Attempt) -> Attempt:
    """Return the newest attempt that this process began, even if the start was interrupted.

    A start that is interrupted, or whose answer is lost, may still have created its attempt. The
    lease decides: every process writes its own instance into the lease before it begins an attempt,
    at a time when that attempt does not exist yet. So if the lease has this process's instance, the
    attempt is its own. Attempts are listed before the lease is read; in the other order, the lease
    could pass to a process that then creates the same number.

    Args:
        objects: the run's objects.
        before: the last attempt of which this process knows that it began it.
    """
    newest = newest_number(objects)
    lease = read_lease(objects)
    own = before.writer, newest, before.instance
    if lease is None or (lease.writer, lease.attempt, lease.instance) != own:
        return before
    begun = next(attempt for attempt in list_attempts(objects) if attempt.number == newest)
    return replace(begun, instance=before.instance)


def note_durable(
    objects: ObjectStore, attempt: Attempt, step: int, last: Held | None = None
) -> Held | None:
    """Record in the lease that `step`, published in `attempt`, is about to be reported durable.

    Does nothing if another process holds the lease by now, since the new holder listed the
    manifests after this one was published; nor if the run was removed, or removed and created
    again.

    Args:
        objects: the run's objects.
        attempt: the attempt of the caller.
        step: the step that was published.
        last: the lease as last written, which saves a request; None: it is read.

    Returns:
        The lease with the step; None if nothing was recorded.
    """
    return _note(objects, attempt, lambda _: (step, attempt.number), last)


def forget_durable(objects: ObjectStore, key: tuple[int, int]) -> None:
    """Remove a step from the lease, if the lease names it, before its tombstone is removed."""

    def forgotten(lease: Lease | None) -> Lease | None:
        if lease is None or lease.durable != key:
            return None
        return lease.model_copy(update={"durable": None})

    _change(objects, forgotten)


def _note(
    objects: ObjectStore,
    attempt: Attempt,
    durable: Callable[[Lease], tuple[int, int] | None],
    last: Held | None,
) -> Held | None:
    def noted(lease: Lease | None) -> Lease | None:
        if lease is None or (lease.writer, lease.attempt) != (attempt.writer, attempt.number):
            return None
        if (last is None or lease is not last.lease) and not is_begun(objects, attempt):
            return None  # an unchanged lease proves that the run was not replaced
        begun = attempt.number, attempt.base_step
        return lease.model_copy(update={"durable": durable(lease), "begun": begun})

    return _change(objects, noted, last)


def renew(
    objects: ObjectStore,
    attempt: Attempt,
    *,
    clock: Clock = utc_now,
    ttl: float = LEASE_TTL_SECONDS,
) -> Held:
    """Extend the lease of `attempt` to `ttl` seconds from now, and return the lease.

    Raises:
        FencedError: the lease was taken for a later attempt, or by another writer, or given back.
    """

    def renewed(current: Lease | None) -> Lease:
        if current is None:
            ensure_newest(objects, attempt)
        else:
            if (current.writer, current.attempt) != (attempt.writer, attempt.number):
                raise _replaced(objects, attempt, current)
            # A job's renewal that comes after its end; a fork takes its own lease up again.
            if current.released and current.instance:
                raise FencedError(
                    "this writer has ended",
                    path=objects.uri,
                    expected=f"the lease of attempt {attempt.number} of {attempt.writer}",
                    found="that it was given back",
                    next_step="Begin a new attempt from the latest step.",
                )
        lease = _lease(attempt.writer, attempt.number, attempt.instance, clock, ttl, current)
        return lease.model_copy(update={"begun": (attempt.number, attempt.base_step)})

    stored_lease = _change(objects, renewed)
    assert stored_lease is not None
    return stored_lease


def release(objects: ObjectStore, attempt: Attempt, *, clock: Clock = utc_now) -> None:
    """Give the lease of `attempt` back, if that attempt still holds it."""
    own = attempt.writer, attempt.number, attempt.instance

    def given_back(lease: Lease | None) -> Lease | None:
        if lease is None or (lease.writer, lease.attempt, lease.instance) != own:
            return None  # another process took it over meanwhile
        return lease.model_copy(update={"expires": rfc3339(clock()), "released": True})

    _change(objects, given_back)


def holds_lease(objects: ObjectStore, attempt: Attempt) -> bool:
    """Return True unless the lease was taken for a later attempt, or by another writer.

    A process that takes the lease over lists the steps to keep only afterwards. So while this
    returns True, it will keep all steps published so far.
    """
    lease = read_lease(objects)
    return lease is None or (lease.writer, lease.attempt) == (attempt.writer, attempt.number)


def _lease(
    writer: str, number: int, instance: str, clock: Clock, ttl: float, before: Lease | None
) -> Lease:
    return Lease(
        writer=writer,
        attempt=number,
        expires=rfc3339(clock() + timedelta(seconds=ttl)),
        instance=instance,
        durable=before.durable if before is not None else None,
        begun=before.begun if before is not None else None,
    )


def _take_as_seen(
    objects: ObjectStore, attempt: Attempt, clock: Clock, ttl: float, seen: Seen
) -> Held | None:
    """Take the lease only if it is unchanged since `seen` was read; else return None."""
    lease = _taking(objects, attempt, clock, ttl, None)(seen.lease)
    try:
        return Held(*write_record(objects, LEASE_FILE, lease, generation=seen.generation))
    except PreconditionFailedError:
        return None


def _taking(
    objects: ObjectStore,
    attempt: Attempt,
    clock: Clock,
    ttl: float,
    before: Attempt | None,
    ends: int | None = None,
) -> Callable[[Lease | None], Lease]:
    writer = attempt.writer

    def taken(lease: Lease | None) -> Lease:
        if lease is None:
            return _lease(writer, attempt.number, attempt.instance, clock, ttl, lease)
        if lease.writer != writer and lease.attempt != ends and lease.is_alive(clock()):
            raise LeaseHeldError(
                "another writer holds the run",
                path=objects.uri,
                expected=f"no writer, or {writer}",
                found=f"{lease.writer} (attempt {lease.attempt}) until {lease.expires} "
                f"plus {CLOCK_MARGIN_SECONDS:g} s",
                next_step="Stop that writer or wait; a restart of the same job must use the "
                "same writer id (CAIRN_WRITER_ID). An administrator may take the run over.",
                holder=lease.writer,
            )
        if before is not None and not lease.released and lease.instance != attempt.instance:
            raise _replaced(objects, before, lease)
        if (
            lease.writer == writer
            and lease.instance != attempt.instance
            and lease.is_alive(clock())
        ):
            logger.warning(
                "%s: attempt %d of %s, the same writer, is taken over before its lease has "
                "expired: if that job still runs, its next save fails. Jobs that may meet in one "
                "run need a CAIRN_WRITER_ID each.",
                objects.uri,
                lease.attempt,
                writer,
            )
        # Another instance, which gave the lease back, may have created this attempt. Its number
        # must not be in a lease of this process: `interrupted_start` would mistake it for its own.
        skips = before is not None and lease.instance != attempt.instance
        number = max(attempt.number, lease.attempt + skips)
        return _lease(writer, number, attempt.instance, clock, ttl, lease)

    return taken


def _change(
    objects: ObjectStore,
    decide: Callable[[Lease | None], Lease | None],
    last: Held | None = None,
) -> Held | None:
    """Change the lease by compare-and-swap, and return it as written; None if it was left alone.

    Args:
        objects: the run's objects.
        decide: returns the new lease for the present one, or None to leave it alone. It is called
            again if another process was faster.
        last: the lease as last written, which is tried first without reading; None: it is read.
    """
    stored: tuple[Lease, bytes] | None = last
    for number in range(_CAS_TRIES):
        if number > 0 or last is None:
            stored = read_record(objects, LEASE_FILE, Lease)
        lease = decide(None if stored is None else stored[0])
        if lease is None:
            return None
        try:
            generation = None if stored is None else stored[1]
            return Held(*write_record(objects, LEASE_FILE, lease, generation=generation))
        except PreconditionFailedError:
            continue
    raise LeaseHeldError(
        "the lease is contended",
        path=objects.uri / LEASE_FILE,
        expected=f"to get it within {_CAS_TRIES} tries",
        found="another change each time",
        next_step="Look for many processes that write the same run under one writer id.",
    )


def _replaced(objects: ObjectStore, attempt: Attempt, lease: Lease) -> FencedError:
    return FencedError(
        "this writer was replaced",
        path=objects.uri,
        expected=f"the lease of attempt {attempt.number} of {attempt.writer}",
        found=f"the lease of attempt {lease.attempt} of {lease.writer}"
        + (", of another process" if lease.attempt == attempt.number else ""),
        next_step="Stop this process, or begin a new attempt from the latest step.",
    )
