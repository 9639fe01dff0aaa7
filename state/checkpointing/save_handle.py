"""Handle of a save: its state, error and duration."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Literal

from cairn.storage.errors import SaveError, StorageError
from cairn.storage.store.uri import StoreURI

__all__ = [
    "SaveHandle",
    "SaveState",
    "StagingKind",
    "call_of_save",
    "pop_call_time",
    "refused_save",
    "superseded_save",
]

logger = logging.getLogger(__name__)


_called: ContextVar[list[float] | None] = ContextVar("cairn_save_called", default=None)
"""Start of the call that will save, by `time.monotonic`, as a list with one number. The save, or
the end of the call, empties the list, so that tasks which copied the context don't use it later."""


@contextmanager
def call_of_save() -> Iterator[None]:
    """Mark the start of a call that will call `Checkpointer.save`.

    `SaveHandle.blocked_seconds` of the first save within the context counts from here.
    """
    if _called.get():
        yield
        return
    began = [time.monotonic()]
    token = _called.set(began)
    try:
        yield
    finally:
        began.clear()
        _called.reset(token)


def pop_call_time() -> float:
    """Return when the call that saves began, by `time.monotonic`; now if none was marked.

    Only the first call within `call_of_save` returns the marked time.
    """
    began = _called.get()
    return began.pop() if began else time.monotonic()


class SaveState(StrEnum):
    """State of a save. All states except "saving" are final.

    saving: the save is under way.
    durable: data is synced, Orbax has committed, the manifest is published.
    failed: the save began and failed; `SaveHandle.error` has the reason.
    superseded: nothing was saved: an earlier save was under way, and the policy's `when_busy` is
        "supersede".
    refused: the save did not begin, and the call raised.
    skipped: nothing was saved, as the caller passed `enable=False`.
    """

    SAVING = "saving"
    DURABLE = "durable"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    REFUSED = "refused"
    SKIPPED = "skipped"


StagingKind = Literal["views", "snapshot", "waves"]


class SaveHandle:
    """Handle of one save. Any thread may wait on it.

    Attributes:
        step: the step being saved.
        attempt: the attempt that the step is written in; 0 if nothing is written.
        uri: the step's folder, which is an ordinary Orbax checkpoint once durable; the run's folder
            if nothing is written.
        blocked_seconds: seconds that the caller was blocked by its call: of `save_state`, of a
            saver, of the manager, or of `Checkpointer.save`.
        nbytes: bytes of the arrays; 0 if unknown.
        staging: how the arrays reached the host: as "views" of host memory, in a "snapshot" of all
            at once, or in "waves".
        waves: number of waves; all except the last were written before `save` returned.
        reason: the policy's reason for the save; None if no policy decided.
    """

    def __init__(self, *, step: int, attempt: int, uri: StoreURI) -> None:
        self.step = step
        self.attempt = attempt
        self.uri = uri
        self.blocked_seconds = 0.0
        self.nbytes = 0
        self.staging: StagingKind = "views"
        self.waves = 1
        self.reason: str | None = None
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._finished = threading.Event()
        self._callback_thread: int | None = None
        self._lock = threading.Lock()
        self._state = SaveState.SAVING
        self._error: BaseException | None = None
        self._superseded_by: int | None = None
        self._reported = False
        self._callbacks: list[Callable[[SaveHandle], None]] = []

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, attempt={self.attempt}, {self.state}, {self.uri})"

    @property
    def state(self) -> SaveState:
        """State of the save."""
        return self._state

    @property
    def done(self) -> bool:
        """True once the save has ended, whatever its outcome."""
        return self._state is not SaveState.SAVING

    @property
    def error(self) -> BaseException | None:
        """Error of a failed or refused save; None in all other states."""
        return self._error

    @property
    def superseded_by(self) -> int | None:
        """Step whose running save superseded this one; None if the state is not "superseded"."""
        return self._superseded_by

    @property
    def seconds(self) -> float | None:
        """Seconds from the start of the save to its end; None while it runs."""
        return self._seconds

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the step is durable: data synced, Orbax committed, manifest published.

        Returns at once for a superseded or skipped save; see `state`.

        Args:
            timeout: maximum seconds to wait; None for no limit.

        Raises:
            SaveError: the save failed; `StoreFullError` if the store has no space left.
            FencedError: another writer took the run over; the step is not listed.
            TimeoutError: the save still runs after `timeout` seconds.
        """
        if not self.ended(timeout):
            raise TimeoutError(
                f"{self.uri}: expected to be durable within {timeout} s, still being saved. "
                "Wait longer; the save goes on."
            )
        error = self._error
        if error is not None:
            self._reported = True
            if not isinstance(error, StorageError):
                error = SaveError("the save failed", found=error)
            raise error.with_traceback(None)  # without that of the last time it was raised

    def ended(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds (None: no limit); return True if the save has ended.

        Does not raise if the save failed: see `state` and `error`.
        """
        if self._callback_thread == threading.get_ident():
            return True  # a `when_done` callback must not wait for itself
        return self._finished.wait(timeout)

    def join(self) -> None:
        """Wait until the save ends; raise its error only if no call has raised that yet."""
        self.ended()
        if not self._reported:
            self.wait()

    def when_done(self, call: Callable[["SaveHandle"], None]) -> None:
        """Call `call` with this handle when the save ends, before `wait` returns in any thread.

        If the save has ended, it is called at once; else in the thread that ends the save. An
        exception that it raises is only logged.
        """
        with self._lock:
            if not self.done:
                self._callbacks.append(call)
                return
        self._run_callback(call)

    def finish(self, error: BaseException | None) -> bool:
        """Mark the save as durable, or as failed with `error`.

        Returns:
            False if the save had ended already, for example by `abandon`; then nothing changes.
        """
        return self._end(SaveState.DURABLE if error is None else SaveState.FAILED, error)

    def skip(self) -> None:
        """Mark the save as skipped by the caller."""
        self._end(SaveState.SKIPPED, None)

    def abandon(self, reason: str) -> bool:
        """Give up on a save that is still under way: it counts as failed from now on.

        Its writes go on while the process lives, but it does not publish its manifest, so the step
        will not be listed. If the manifest is just being written, the step may be listed; the run's
        next save then supersedes it.

        Args:
            reason: text for the error.

        Returns:
            False if the save had ended already; then nothing changes.
        """
        error = SaveError(
            "the save was abandoned",
            path=self.uri,
            expected="a durable step",
            found=reason,
            next_step="See the run for what it lists; what was stored before is untouched.",
        )
        return self._end(SaveState.FAILED, error)

    def _end(
        self, state: SaveState, error: BaseException | None, superseded_by: int | None = None
    ) -> bool:
        with self._lock:
            if self.done:
                return False
            self._error, self._superseded_by = error, superseded_by
            self._seconds = time.monotonic() - self._began
            self._state = state
            callbacks, self._callbacks = self._callbacks, []
        self._callback_thread = threading.get_ident()
        for call in callbacks:
            self._run_callback(call)
        self._finished.set()
        self._callback_thread = None
        return True

    def _run_callback(self, call: Callable[["SaveHandle"], None]) -> None:
        try:
            call(self)
        except Exception:
            logger.exception("what follows the save of step %d failed", self.step)


def superseded_save(*, step: int, uri: StoreURI, by: int) -> SaveHandle:
    """Return the handle of a step that was not saved because the save of step `by` was running."""
    handle = SaveHandle(step=step, attempt=0, uri=uri)
    handle._end(SaveState.SUPERSEDED, None, by)
    return handle


def refused_save(*, step: int, uri: StoreURI, error: BaseException) -> SaveHandle:
    """Return the handle of a save that did not begin because of `error`."""
    handle = SaveHandle(step=step, attempt=0, uri=uri)
    handle._end(SaveState.REFUSED, error)
    return handle
