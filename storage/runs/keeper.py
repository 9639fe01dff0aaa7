"""Holds a writer's attempt: begins it, keeps its lease alive in the background, gives it back.

No JAX. Only the process that talks to the store has one.
"""

import contextlib
import threading
from collections.abc import Callable
from uuid import uuid4

from cairn.storage.errors import FencedError, SaveError, StorageError
from cairn.storage.runs.attempts import Attempt, ensure_newest, list_attempts, set_aside
from cairn.storage.runs.lease import begin_attempt, holds_lease, note_durable, release, renew
from cairn.storage.store import Clock, ObjectStore

__all__ = ["AttemptKeeper"]


class AttemptKeeper:
    """The attempt that one writer holds on a run, if any.

    Args:
        objects: the run's objects.
        writer: id of the writer, the same over restarts.
        clock: tells the time.
        ttl: how long the lease lasts unless renewed, in seconds; a third of it between renewals.
    """

    def __init__(self, objects: ObjectStore, *, writer: str, clock: Clock, ttl: float) -> None:
        self._objects = objects
        self._writer = writer
        self._clock = clock
        self._ttl = ttl
        self._instance = uuid4().hex
        self._attempt: Attempt | None = None
        self._given_up = False
        self._fenced: FencedError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def attempt(self) -> Attempt | None:
        """The attempt to write in; None before the first and after one was given up."""
        return None if self._given_up else self._attempt

    def begin(self, base_step: Callable[[], int]) -> Attempt:
        """Begin the next attempt, in place of the one held.

        Args:
            base_step: the last step to keep; called once the lease is held.

        Raises:
            LeaseHeldError: another writer holds the run.
            FencedError: this writer was replaced earlier.
        """
        self.check()
        self.drop()  # its lease is taken for the next one, whether that begins or not
        self._pause()
        self._attempt = begin_attempt(
            self._objects,
            writer=self._writer,
            base_step=base_step,
            clock=self._clock,
            ttl=self._ttl,
            instance=self._instance,
            before=self._attempt,
        )
        self._given_up = False
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._keep, args=(self._attempt, self._stop), name="cairn-lease", daemon=True
        )
        self._thread.start()
        return self._attempt

    def check(self) -> None:
        """Raise if a renewal has found that another writer took over.

        Raises:
            FencedError: one did. This stays so: the writer has to be made anew.
        """
        if self._fenced is not None:
            raise self._fenced.with_traceback(None)

    def fence(self) -> None:
        """Raise unless the attempt is still the newest in the store.

        Raises:
            FencedError: a later attempt exists.
        """
        try:
            ensure_newest(self._objects, self._held())
        except FencedError as exc:
            self._fenced = exc
            raise

    def ensure_counts(self, step: int) -> None:
        """Raise unless `step`, just published in this attempt, is among the steps that count.

        Raises:
            FencedError: a later attempt set the step aside, or another start holds the lease and
                may be about to.
        """
        attempt = self._held()
        held = holds_lease(self._objects, attempt)
        attempts = list_attempts(self._objects)
        if set_aside(attempts)(step, attempt.number):
            self.fence()
        if not held and attempts[-1].number <= attempt.number:
            self._fenced = FencedError(
                "this writer is being replaced",
                path=self._objects.uri,
                expected=f"the lease of attempt {attempt.number} of {attempt.writer}",
                found=f"another start, which may keep step {step} or not",
                next_step="Stop this process; see the run for what was kept.",
            )
            raise self._fenced

    def note(self, step: int) -> None:
        """Note in the lease that `step`, just published in this attempt, is there."""
        note_durable(self._objects, self._held(), step)

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

    def drop(self) -> None:
        """Write no more in this attempt; the next save begins another. The lease is kept."""
        self._given_up = True

    def close(self) -> None:
        """Give the lease back, so that another writer need not wait for it to expire."""
        self._pause()
        if self._attempt is not None and self._fenced is None:
            with contextlib.suppress(StorageError):  # what was saved stays saved
                release(self._objects, self._attempt, clock=self._clock)
        self._attempt = None

    def _pause(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _keep(self, attempt: Attempt, stop: threading.Event) -> None:
        """Renew until stopped. A store that does not answer is asked again; a fence is final."""
        while not stop.wait(self._ttl / 3):
            try:
                renew(self._objects, attempt, clock=self._clock, ttl=self._ttl)
            except FencedError as exc:
                self._fenced = exc
                return
            except StorageError:
                continue
