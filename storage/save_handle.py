"""The handle of one save: whether it is durable yet, and what went wrong. No JAX."""

import threading

from storage.errors import SaveError, StorageError
from storage.uri import StoreURI

__all__ = ["SaveHandle"]


class SaveHandle:
    """One save under way. Any thread may wait on it.

    Attributes:
        step: the step being saved.
        attempt: the attempt it is written in.
        uri: the step's folder, an ordinary Orbax checkpoint once durable.
        blocked_seconds: how long `save` kept its caller.
    """

    def __init__(self, *, step: int, attempt: int, uri: StoreURI) -> None:
        self.step = step
        self.attempt = attempt
        self.uri = uri
        self.blocked_seconds = 0.0
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._reported = False

    def __repr__(self) -> str:
        state = "failed" if self._error else "durable" if self.done else "saving"
        return f"SaveHandle(step={self.step}, attempt={self.attempt}, {state}, {self.uri})"

    @property
    def done(self) -> bool:
        """True once the save is durable or has failed."""
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why the save failed; None while it runs and once it is durable."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Return once the step is durable: data synced, Orbax committed, manifest published.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            SaveError: the save failed (`StoreFullError` if for lack of space).
            FencedError: a later attempt took the run over; the step is not listed.
            TimeoutError: it still runs after `timeout` seconds.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(
                f"{self.uri}: expected to be durable within {timeout} s, still being saved. "
                "Wait longer; the save goes on."
            )
        if self._error is not None:
            self._reported = True
            raise _again(self._error)

    def join(self) -> None:
        """`wait` for as long as it takes, but raise only an error that no call has raised yet."""
        self._finished.wait()
        if not self._reported:
            self.wait()

    def finish(self, error: BaseException | None) -> None:
        """Tell all who wait that the save is durable, or why it failed."""
        self._error = error
        self._finished.set()


def _again(error: BaseException) -> BaseException:
    """An error fit to be raised in one more thread: without the traceback of the last raise."""
    known = error if isinstance(error, StorageError) else SaveError("the save failed", found=error)
    return known.with_traceback(None)
