"""Writer of a run: begins attempts, publishes steps, renews its lease, and gives it back.

    claim    the lease -> present state -> the next attempt, if this step needs one
    publish  durable data -> still the newest? -> manifest -> noted in the lease -> still counts?

Only the process that talks to the store for a job has one. A step is not listed before its manifest
is written; from then on it counts, unless a later attempt goes back before it.
"""

import contextlib
import getpass
import os
import socket
import threading
from collections.abc import Callable, Collection
from typing import SupportsIndex
from uuid import uuid4

from cairn.storage.errors import (
    FencedError,
    RunNotFoundError,
    SaveError,
    StepExistsError,
    StorageError,
    translate_error,
)
from cairn.storage.runs.damage import newest_sound
from cairn.storage.runs.history import (
    History,
    RunListing,
    history_since,
    list_records,
    published_steps,
    read_history,
    seen_in,
)
from cairn.storage.runs.lease import (
    LEASE_TTL_SECONDS,
    Held,
    Seen,
    Started,
    holds_lease,
    interrupted_start,
    note_begun,
    note_durable,
    release,
    renew,
    start_attempt,
)
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.attempts import (
    Attempt,
    Kept,
    ensure_newest,
    find_superseded,
    is_begun,
    judge_attempts,
    run_removed,
)
from cairn.storage.runs.records.layout import annotation_file, check_step, manifest_file
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.runs.records.placed import put_record, write_record
from cairn.storage.runs.run import Run
from cairn.storage.store.clock import Clock, utc_now
from cairn.storage.store.deadlines import deadline_after, deadline_seconds_left
from cairn.storage.store.disk.directory_entries import fsync_path, sync_entries
from cairn.storage.store.disk.stale_locks import LOCK_SUFFIX
from cairn.storage.store.files_local import TEMPORARY_PREFIX
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.uri import StoreURI
from cairn.storage.store_checks.probe import Probe

__all__ = ["Writer", "default_writer_id", "publish_manifest", "sync_folder"]

_RENEWAL_SECONDS = 1.0
"""Most seconds to wait for a running renewal; once the lease was taken again, it has no effect."""

_GIVING_BACK_SECONDS = 10.0
"""Most seconds to try to give a lease back; otherwise it expires."""


def default_writer_id() -> str:
    """Return CAIRN_WRITER_ID, or else user@host, which is the same over restarts on a machine."""
    writer = os.environ.get("CAIRN_WRITER_ID")
    if writer:
        return writer
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


class Writer:
    """Writer of a run, by its id: at most one at a time. Safe for use by many threads.

    Args:
        run: the run.
        writer: id of the writer, the same over restarts.
        clock: returns the current time in UTC.
        ttl: seconds until the lease expires unless renewed; it is renewed every third of that time.
    """

    def __init__(
        self,
        run: Run,
        *,
        writer: str,
        clock: Clock = utc_now,
        ttl: float = LEASE_TTL_SECONDS,
    ) -> None:
        self._run = run
        self._objects = run.objects
        self._writer = writer
        self._clock = clock
        self._ttl = ttl
        self._instance = uuid4().hex
        self._attempt: Attempt | None = None
        self._lease: Held | None = None
        self._probe: Probe | None = None
        self._claimed: tuple[int, int] | None = None
        self._latest: int | None = None
        self._skipped: Collection[tuple[int, int]] | None = None
        self._given_up = False
        self._overwrites: int | None = None
        self._unsettled: tuple[int, int] | None = None
        self._starting = False
        self._fenced: FencedError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def attempt(self) -> Attempt | None:
        """Current attempt; None before the first, and after `drop` or `close`."""
        return None if self._given_up else self._attempt

    def begin(self, listing: RunListing | None = None) -> int:
        """Take the run now, not with the first step; return the number of the current attempt.

        Args:
            listing: a listing of the run made just now; None: it is listed here.

        Raises:
            LeaseHeldError: another writer holds the run.
            FencedError: this writer was replaced earlier.
            StoreCheckError: the store does not keep the promises that runs depend on.
        """
        self.check()
        attempt = self.attempt
        if self._skipped is not None:
            return self._begin(self._last_to_keep).number
        if attempt is not None:
            return attempt.number
        return self._begin(self._last_to_keep, seen=self._looked(listing)).number

    def skip_damaged(self, skipped: Collection[tuple[int, int]] = ()) -> None:
        """Make the next `begin` or `claim` resume from the newest step without noted damage.

        It begins an attempt for that; damaged steps above are superseded then.

        Args:
            skipped: (step, attempt) of steps to supersede even if they are sound by then, because
                the job did not resume from them.
        """
        self._skipped = skipped

    def claim(
        self, step: SupportsIndex, *, overwrite: bool = False, listing: RunListing | None = None
    ) -> int:
        """Return the number of the attempt in which to write `step`; replace an earlier claim.

        Args:
            step: number of the step; above the latest listed step, unless `overwrite`.
            overwrite: whether this step and later ones are superseded once the step is published.
            listing: a listing of the run made just now; None: it is listed here.

        Raises:
            InvalidURIError: `step` is not a step number.
            StepExistsError: the run lists this step or a later one, and `overwrite` is False.
            LeaseHeldError: another writer holds the run.
            FencedError: this writer was replaced earlier.
            StoreCheckError: the store does not keep the promises that runs depend on.
        """
        self.check()
        step = check_step(step)
        self._claimed = None
        number = self._attempt_for(step, overwrite, listing)
        self._claimed = step, number
        return number

    def _attempt_for(self, step: int, overwrite: bool, listing: RunListing | None) -> int:
        skips = self._skipped is not None  # then `base_step` finds the latest step
        attempt = None if skips else self.attempt
        seen = self._looked(listing) if attempt is None and not skips else None
        below = not skips and self._latest is not None and step <= self._latest
        if below and not overwrite:
            raise self._exists(step)
        if attempt is not None and not below and self._overwrites is None:
            return attempt.number

        def base_step() -> Kept:
            """Keep every listed step: an overwritten one stays until its successor is published."""
            keep = self._last_to_keep()
            if self._latest is not None and step <= self._latest and not overwrite:
                raise self._exists(step)
            return keep

        return self._begin(base_step, overwrites=step if overwrite else None, seen=seen).number

    def publish(
        self,
        manifest: Manifest,
        annotation: Annotation | None = None,
        *,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a step listed, durably; its data must be durable already.

        If the store does not answer while the manifest is written, it is unknown whether the
        manifest exists. The next claim, or `close`, supersedes it, so that a failed step does not
        reappear.

        Args:
            manifest: manifest of the step that was claimed last, in the attempt of that claim.
            annotation: labels and metrics of the step; None: there are none.
            before: writes the other objects that the manifest names; it is called concurrently with
                the check that the step may be published.

        Raises:
            FencedError: a later attempt took the run over; the step does not count.
            SaveError: the writer was closed, or the step was not claimed, or `drop` was called
                meanwhile; nothing was written.
            StoreCheckError: the store does not keep the promises that runs depend on.
            StoreUnavailableError: the store gives no answer.
            PreconditionFailedError: another manifest exists already.
        """
        try:
            self._publish(manifest, annotation, before)
        except RunNotFoundError as exc:
            self._fenced = run_removed(self._objects, self._held())
            raise self._fenced from exc

    def _publish(
        self,
        manifest: Manifest,
        annotation: Annotation | None,
        before: Callable[[], object],
    ) -> None:
        step = manifest.step
        self._refuse_unclaimed(manifest)
        if self._probe is not None:
            self._probe.ensure_finished()

        def annotate() -> None:
            if annotation is not None:
                put_record(self._objects, annotation_file(step, manifest.attempt), annotation)

        # One round trip instead of three. A local disk gains nothing by that, and checks the fence
        # later.
        if self._objects.is_remote:
            self._objects.gather(before, annotate, self._fence)
        else:
            before()
            annotate()

        def look_last() -> None:
            """Raise if the manifest must not be written; after this call it may exist."""
            if not self._objects.is_remote:  # a remote store was checked just now
                self._fence()
            self._refuse_unclaimed(manifest)
            self._unsettled = manifest.step, manifest.attempt

        generation = publish_manifest(self._objects, manifest, look_last)
        # If the lease is still ours, nobody took over before the manifest existed, and the next
        # holder will see it. Otherwise the store's records decide whether the step counts.
        noted = note_durable(self._objects, self._held(), step, self._lease)
        if noted is None:
            self._ensure_counts(manifest, generation)
        self._lease = noted
        self._claimed = self._unsettled = self._overwrites = None
        self._latest = step

    def check(self) -> None:
        """Raise FencedError if a renewal has noticed that another writer took over.

        Raises:
            FencedError: another writer took over. This is final: create a new writer.
        """
        if self._fenced is not None:
            raise self._fenced.with_traceback(None)

    def drop(self) -> None:
        """Stop writing in this attempt; the next claim begins another. The lease is kept."""
        self._given_up = True
        self._claimed = None

    def close(self) -> None:
        """Give the lease back, so that another writer does not have to wait for its expiry."""
        self._pause()
        if self._attempt is not None and self._fenced is None:
            # A failure here loses nothing: the steps are saved, and the lease expires.
            with contextlib.suppress(StorageError), deadline_after(_GIVING_BACK_SECONDS):
                if self._unsettled is not None:
                    self._begin(self._last_to_keep)
                    self._pause()
                release(self._objects, self._attempt, clock=self._clock)
        self._attempt = None

    def _begin(
        self,
        base_step: Callable[[], Kept],
        overwrites: int | None = None,
        seen: Seen | None = None,
    ) -> Attempt:
        """Begin the next attempt in place of the current one, and return it."""
        self.check()
        self.drop()  # the lease is taken for the next attempt, even if that fails to begin
        self._pause()
        # The last start was interrupted or failed.
        if self._starting and self._attempt is not None:
            self._attempt = interrupted_start(self._objects, self._attempt)
        self._starting = True
        started = start_attempt(
            self._objects,
            writer=self._writer,
            base_step=base_step,
            overwrites=overwrites,
            clock=self._clock,
            ttl=self._ttl,
            instance=self._instance,
            before=self._attempt,
            seen=seen,
        )
        self._attempt, self._lease, self._probe = started.attempt, started.held, started.probe
        # In the background where a request is slow. Not if it goes back: the lease must no longer
        # name a durable step that this attempt does not keep.
        later = not started.goes_back and self._objects.is_remote
        if not later:
            self._lease = note_begun(self._objects, started)
        self._starting, self._skipped = False, None
        self._given_up = False
        self._overwrites = overwrites
        self._unsettled = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._hold,
            args=(self._attempt, self._stop, started if later else None),
            name="cairn-lease",
            daemon=True,
        )
        self._thread.start()
        return self._attempt

    def _looked(self, listing: RunListing | None) -> Seen | None:
        """Return the run's state for a start, with its latest step; None: use `_last_to_keep`.

        Args:
            listing: a listing of the run made just now; None: it is listed here.
        """
        if listing is None:
            listing = list_records(self._objects)
        if listing.is_empty and self._attempt is None:
            self._latest = None
            return Seen(None, None, newest=(0, -1), highest=0, kept=-1)
        history = history_since(self._objects, listing)
        if history is None or self._unsettled is not None:
            latest, history = self._settled_history().latest(), None
        else:
            latest = history.latest()
        self._latest = None if latest is None else latest[0]
        if history is None or self._attempt is not None:
            return None
        return seen_in(self._objects, listing, history, latest)

    def _last_to_keep(self) -> Kept:
        """Return the latest step that is listed now; -1 if there is none."""
        history = self._settled_history()
        latest = history.latest()
        if self._skipped is not None:
            latest = newest_sound(self._run, history, skipped=self._skipped)
        self._latest = None if latest is None else latest[0]
        return -1 if latest is None else latest

    def _settled_history(self) -> History:
        """Return the history without a step whose publication failed or was interrupted."""
        return read_history(self._objects).without(self._unsettled)

    def _exists(self, step: int) -> StepExistsError:
        return StepExistsError(
            "the step exists",
            path=self._run.uri,
            expected=f"a step above {self._latest}, the latest",
            found=f"step {step}",
            next_step="To resume, load the latest step before the loop. To save it anew, pass "
            "overwrite=True: later steps are superseded.",
        )

    def _fence(self) -> None:
        """Raise FencedError unless the attempt is still the newest in the store."""
        try:
            ensure_newest(self._objects, self._held())
        except FencedError as exc:
            self._fenced = exc
            raise

    def _refuse_unclaimed(self, manifest: Manifest) -> None:
        self._held()
        key = manifest.step, manifest.attempt
        if key == self._claimed:
            return
        claimed = "none"
        if self._claimed is not None:
            claimed = f"that of step {self._claimed[0]} in attempt {self._claimed[1]}"
        raise SaveError(
            "the step was not claimed",
            path=self._objects.uri / manifest_file(*key),
            expected=f"a claim of step {key[0]} that gave attempt {key[1]}",
            found=claimed,
            next_step="Claim the step, and write it in the attempt that the claim gives.",
        )

    def _ensure_counts(self, manifest: Manifest, generation: bytes) -> None:
        """Raise FencedError unless the step that was just published counts.

        If the run was removed, the manifest is deleted again, since another run can begin there.

        Raises:
            FencedError: a later attempt superseded the step, or another start holds the lease and
                may supersede it; or the run was removed.
        """
        attempt = self._held()
        if not is_begun(self._objects, attempt):
            with contextlib.suppress(StorageError):
                name = manifest_file(manifest.step, manifest.attempt)
                self._objects.delete_if(name, generation=generation)
            self._fenced = run_removed(self._objects, attempt)
            raise self._fenced
        has_lease = holds_lease(self._objects, attempt)
        own = attempt.number, attempt.base_step
        saved = published_steps(self._objects)
        attempts = judge_attempts(self._objects, own).known
        if find_superseded(attempts, saved)(manifest.step, manifest.attempt):
            self._fence()
        if not has_lease and attempts[-1].number <= attempt.number:
            self._fenced = FencedError(
                "this writer is being replaced",
                path=self._objects.uri,
                expected=f"the lease of attempt {attempt.number} of {attempt.writer}",
                found=f"another start, which may keep step {manifest.step} or not",
                next_step="Stop this process; see the run for what was kept.",
            )
            raise self._fenced

    def _held(self) -> Attempt:
        if self._attempt is None:
            raise SaveError(
                "the run was given back",
                path=self._objects.uri,
                expected=f"an attempt of {self._writer}",
                found="none",
                next_step="Save again; the step is not listed.",
            )
        return self._attempt

    def _pause(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            left = deadline_seconds_left()
            self._thread.join(_RENEWAL_SECONDS if left is None else min(left, _RENEWAL_SECONDS))
        self._thread = None

    def _hold(self, attempt: Attempt, stop: threading.Event, started: Started | None) -> None:
        """Record the attempt in the lease, and renew the lease until stopped."""
        if started is not None:
            with contextlib.suppress(StorageError):  # the first publication records it, too
                self._lease = note_begun(self._objects, started)
        self._keep(attempt, stop)

    def _keep(self, attempt: Attempt, stop: threading.Event) -> None:
        """Renew the lease until stopped. Retry without an answer; end if another took over."""
        while not stop.wait(self._ttl / 3):
            try:
                self._lease = renew(self._objects, attempt, clock=self._clock, ttl=self._ttl)
            except FencedError as exc:
                if not stop.is_set():  # otherwise this writer has begun its next attempt
                    self._fenced = exc
                return
            except StorageError:
                continue


def publish_manifest(objects: ObjectStore, manifest: Manifest, fence: Callable[[], None]) -> bytes:
    """Write the manifest durably, by which the step becomes "verified complete" and listed.

    Args:
        objects: the run's objects.
        manifest: the manifest to publish.
        fence: function that raises if a later attempt has taken the run over; called right before
            the write.

    Returns:
        The generation of the manifest.

    Raises:
        FencedError: a later attempt exists.
        PreconditionFailedError: another manifest exists already.
    """
    _sync_names(objects.uri)  # fsync what the manifest names before the manifest
    fence()
    name = manifest_file(manifest.step, manifest.attempt)
    # Created only if absent: a manifest never changes.
    _, generation = write_record(objects, name, manifest, generation=None)
    _sync_names(objects.uri)
    return generation


def sync_folder(folder: StoreURI) -> None:
    """Fsync every file and directory below `folder`, and the directories that lead there.

    Files with temporary names are left out: their writer fsyncs them, and may rename them
    meanwhile. Object stores are durable once they answer, so nothing is done for them.

    Raises:
        StoreFullError: the disk found only now that it is full.
        StoreUnavailableError: the disk failed.
    """
    if folder.scheme != "file":
        return
    try:
        # Bottom-up: a directory is synced after everything in it.
        for directory, _, names in os.walk(folder.local_path, topdown=False, onerror=_raised):
            for name in names:
                if not (name.startswith(TEMPORARY_PREFIX) or name.endswith(LOCK_SUFFIX)):
                    fsync_path(os.path.join(directory, name))
            fsync_path(directory)
        fsync_path(folder.parent.local_path)
        fsync_path(folder.parent.parent.local_path)
    except OSError as exc:
        raise translate_error(exc, path=folder) from exc


def _sync_names(run: StoreURI) -> None:
    """Fsync the directories that lead to a local run and to its folders.

    Raises:
        StoreUnavailableError: the disk failed.
    """
    if run.scheme != "file":
        return
    try:
        sync_entries(run.local_path)
    except OSError as exc:
        raise translate_error(exc, path=run) from exc


def _raised(error: OSError) -> None:
    raise error
