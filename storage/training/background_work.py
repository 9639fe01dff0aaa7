"""One piece of work in a thread of its own, of which others learn when it is over. No JAX."""

import threading
from collections.abc import Callable

__all__ = ["BackgroundWork"]


class BackgroundWork:
    """A thread that keeps the process alive until it ends.

    Attributes:
        over: set once the work has ended, however it did.
    """

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        """Not started yet.

        Args:
            work: what to do.
            name: of the thread.
        """
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []
        self.over = threading.Event()

    @property
    def started(self) -> bool:
        """True once the thread exists."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def when_over(self, call: Callable[[], object]) -> None:
        """Call `call` once the work is over: at once if it is, else in its thread."""
        with self._lock:
            if not self.over.is_set():
                self._calls.append(call)
                return
        call()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._lock:
                self.over.set()
                calls, self._calls = self._calls, []
            for call in calls:
                call()
