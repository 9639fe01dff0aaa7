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
"""Start of the call that is about to save, on the clock of `time.monotonic`. A list, which the save
or the end of the call empties: tasks that inherited the context may outlive the call."""


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
    """Return the start of the current call, on the clock of `time.monotonic`; for one save only."""
    began = _called.get()
    return began.pop() if began else time.monotonic()


class SaveState(StrEnum):
    """State of a save. All but "saving" are final.

    saving: under way.
    durable: data synced, Orbax committed, manifest published.
    failed: it began and did not become durable; `SaveHandle.error` has the reason.
    superseded: left out because another save was under way, as the save policy asked.
    refused: it did not begin; the call raised.
    skipped: left out because the caller said so (`enable=False`).
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
        attempt: the attempt it is written in; 0 if nothing is written.
        uri: the step's folder, an ordinary Orbax checkpoint once durable; the run's if nothing is
            written.
        blocked_seconds: how long the call blocked its caller: the call of the state, of the saver,
            of the manager, or of `Checkpointer.save`.
        nbytes: bytes of the arrays, where known.
        staging: how arrays reached the host: as "views" of host memory, a "snapshot" of all at
            once, or in "waves".
        waves: number of waves; all but the last were written before `save` returned.
        reason: reason for the save, if a policy decided.
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
        """True once the save is no longer under way, whatever its outcome."""
        return self._state is not SaveState.SAVING

    @property
    def error(self) -> BaseException | None:
        """Error of a failed or refused save; None while it runs and once it is durable."""
        return self._error

    @property
    def superseded_by(self) -> int | None:
        """Step whose running save superseded this one; None otherwise."""
        return self._superseded_by

    @property
    def seconds(self) -> float | None:
        """Seconds from the start of the save to its end; None while it runs."""
        return self._seconds

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the step is durable: data synced, Orbax committed, manifest published.

        Returns at once for a superseded or skipped save; see `state`.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            SaveError: the save failed (`StoreFullError` if for lack of space).
            FencedError: a later attempt took the run over; the step is not listed.
            TimeoutError: it still runs after `timeout` seconds.
        """
        if not self.ended(timeout):
            raise TimeoutError(
                f"{self.uri}: expected to be durable within {timeout} s, still being saved. "
                "Wait longer; the save goes on."
            )
        if self._error is not None:
            self._reported = True
            raise _without_traceback(self._error)

    def ended(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; return True if the save is no longer under way.

        A failure raises nothing: see `state` and `error`.
        """
        if self._callback_thread == threading.get_ident():
            return True  # a `when_done` callback must not wait for itself
        return self._finished.wait(timeout)

    def join(self) -> None:
        """Wait without a limit; raise an error only if no call has raised it yet."""
        self.ended()
        if not self._reported:
            self.wait()

    def when_done(self, call: Callable[["SaveHandle"], None]) -> None:
        """Call `call` with this handle when the save ends, before waiting threads wake.

        At once if it has ended; else in the thread that ends it. An exception from `call` is only
        logged.
        """
        with self._lock:
            if not self.done:
                self._callbacks.append(call)
                return
        self._run_callback(call)

    def finish(self, error: BaseException | None) -> bool:
        """Mark the save as durable, or as failed with `error`.

        Returns:
            False if it had ended already, for example by `abandon`: then nothing changes.
        """
        return self._end(SaveState.DURABLE if error is None else SaveState.FAILED, error)

    def skip(self) -> None:
        """Mark the save as skipped by the caller."""
        self._end(SaveState.SKIPPED, None)

    def abandon(self, reason: str) -> bool:
        """Give up on a save that is still under way: it counts as failed from now on.

        Its writes go on for as long as the process lives, but it no longer publishes its manifest,
        so the step will not be listed. If the manifest is being written just now, the run's next
        save supersedes the step.

        Returns:
            False if it had ended already.
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
    """Return the handle of a save that was left out while the save of step `by` ran."""
    handle = SaveHandle(step=step, attempt=0, uri=uri)
    handle._end(SaveState.SUPERSEDED, None, by)
    return handle


def refused_save(*, step: int, uri: StoreURI, error: BaseException) -> SaveHandle:
    """Return the handle of a save that did not begin because of `error`."""
    handle = SaveHandle(step=step, attempt=0, uri=uri)
    handle._end(SaveState.REFUSED, error)
    return handle


def _without_traceback(error: BaseException) -> BaseException:
    """Return an error without the traceback of its last raise, to be raised again."""
    if not isinstance(error, StorageError):
        error = SaveError("the save failed", found=error)
    return error.with_traceback(None)
