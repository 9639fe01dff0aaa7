"""Retention in the background of a training job, after each durable save."""

import threading
from collections.abc import Callable

from cairn.state.checkpointing import exit_guard
from cairn.state.checkpointing.saves.save_metrics import record_retention, record_withheld
from cairn.storage.errors import PolicyError, StorageError, translate_error
from cairn.storage.runs.gc import collect_garbage
from cairn.storage.runs.retention import RetentionOutcome, RetentionPolicy, apply_retention
from cairn.storage.runs.run import Run
from cairn.storage.runs.trash import GRACE_SECONDS, read_tombstones
from cairn.storage.store.clock import Clock, utc_now
from cairn.storage.store.deadlines import Progress

__all__ = ["RunRetention"]


class RunRetention:
    """Applies a retention policy to a run in the background, one pass at a time. Never raises.

    A pass deletes nothing if the policy names a metric or a label that no step has; this is logged
    once. Deleted steps go to the trash; when a step's grace time has passed, a pass collects
    garbage.

    Args:
        run: the run.
        policy: the policy, or a function that deletes steps itself and returns the outcome.
        by: name of who deletes, for the records of the deletions.
        grace: seconds during which a deleted step can be restored.
        clock: returns the current time in UTC.

    Attributes:
        error: error of the last pass; None if that pass succeeded or no pass has run.
    """

    def __init__(
        self,
        run: Run,
        policy: RetentionPolicy | Callable[[], RetentionOutcome],
        *,
        by: str,
        grace: float = GRACE_SECONDS,
        clock: Clock = utc_now,
    ) -> None:
        self._run = run
        self._apply: Callable[[], RetentionOutcome] = (
            (lambda: apply_retention(run, policy, by=by, grace=grace, clock=clock))
            if isinstance(policy, RetentionPolicy)
            else policy
        )
        self._by = by
        self._clock = clock
        self.error: StorageError | None = None
        self._lock = threading.Lock()
        self._wanted = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start a pass, or queue one after the running pass. Returns at once."""
        with self._lock:
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="cairn-retention", daemon=True
                )
                self._thread.start()
                exit_guard.guard(self)

    def close(self) -> None:
        """Wait until no pass runs. After a later `start`, call this again.

        The wait ends at the deadline for a store that does not respond, since a pass may ask the
        store about one step after another. The next pass deletes what this one did not.
        """
        exit_guard.release(self)
        thread = self._thread
        if thread is not None:
            thread.join(Progress().seconds_left())

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                self._wanted = False
            try:
                self._pass()
            except PolicyError as exc:
                if str(exc) != str(self.error):
                    record_withheld(self._run.uri, exc)
                self.error = exc
            except Exception as exc:
                self.error = translate_error(exc, path=self._run.uri)
                record_retention(self._run.uri, errors=(self.error,))

    def _pass(self) -> None:
        outcome = self._apply()
        self.error = next(iter(outcome.errors), None)
        record_retention(self._run.uri, deleted=len(outcome.deleted), errors=outcome.errors)
        now = self._clock()
        tombstones = read_tombstones(self._run.objects).values()
        if any(tombstone.is_due(now) for tombstone in tombstones):
            collect_garbage(self._run, by=self._by, clock=self._clock)
