"""Execution of a job in this process: steps, progress, interruption."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from cairn.counts import count_text
from cairn.service.http.problems import problem_from
from cairn.service.jobs.context import JobCancelled, JobContext, JobsStopping, Result
from cairn.service.jobs.errors import JobFailedError, PartsFailedError
from cairn.service.jobs.progress import ProgressMeter
from cairn.service.observability.tracing import span
from cairn.storage.errors import StoreUnavailableError
from cairn.storage.store.uri import StoreURI

logger = logging.getLogger(__name__)

STEP_RETRY_SECONDS: Final = (0.5, 1.0, 2.0)


class StepRunner(Protocol):
    """Interface of the engine that an execution runs on."""

    def run_step(self, name: str, body: Callable[[], Result]) -> Result:
        """Return the recorded result of a step; if there is none, run `body` and record its result.

        Raises:
            JobFailedError: `body` failed before a restart, and its problem was recorded.
        """

    def run_parts(
        self,
        token: str,
        parts: Sequence[Result],
        *,
        at_once: int | None,
        done: Callable[[int], None],
    ) -> tuple[list[Result | None], Result | None]:
        """Run `parts` in other workflows; see `JobContext.parts`.

        Args:
            token: See `JobContext.parts`.
            parts: See `JobContext.parts`.
            at_once: See `JobContext.parts`.
            done: Function that is called now and then with the number of finished bytes; if it
                raises, the wait ends with its error.

        Returns:
            The result of each part, None for unfinished parts; and the problem of a failed part, or
            None.
        """

    def report(self, progress: dict[str, Any]) -> None:
        """Store the progress of the operation whose step this thread runs.

        Raises:
            BaseException: The operation no longer belongs to this execution.
        """


class Execution(JobContext):
    """Context of a running job.

    Attributes:
        finished: Event that is set once the job has ended here, its clean-up included.
        interrupted: Event that is set to stop the job.
        is_part: True if this executes a part of the operation's job.
    """

    def __init__(
        self,
        operation_id: str,
        *,
        roots: Mapping[str, StoreURI],
        runner: StepRunner,
        stopping: Callable[[], bool],
        worked: Callable[[int], None] = lambda nbytes: None,
        is_part: bool = False,
    ) -> None:
        self.operation_id = operation_id
        self.roots = roots
        self.is_part = is_part
        self.progress = ProgressMeter(self._report, clock=time.monotonic)
        self.finished = threading.Event()
        self.interrupted = threading.Event()
        self._runner = runner
        self._stopping = stopping
        self._in_step = False
        self._worked = worked
        self._counted = 0
        self._elsewhere = False

    def step(self, name: str, function: Callable[[], Result]) -> Result:
        """Run `function` once; see `JobContext`.

        Raises:
            JobFailedError: `function` failed, after some retries if the store did not answer.
        """

        def body() -> Result:
            self._in_step = True
            try:
                with span(f"step {name}"):
                    result = self._with_retries(function)
                    self.progress.flush()
                    return result
            except Exception as exc:
                raise self.failure(exc) from exc
            finally:
                self._in_step = False

        return self._runner.run_step(name, body)

    def parts(
        self, token: str, parts: Sequence[Result], *, at_once: int | None = None
    ) -> list[Result]:
        """Run each part once; see `JobContext`.

        Raises:
            PartsFailedError: A part failed.
        """
        before = self.progress.done_bytes

        def done(nbytes: int) -> None:
            self.check()
            self.progress.set(done_bytes=before + nbytes)

        def body() -> Result:
            self._elsewhere = True  # the worker of a part counts its bytes
            total = before + sum(int(part["nbytes"]) for part in parts)
            self.progress.set(
                total_bytes=total, message=f"writing {count_text(len(parts), 'file')}"
            )
            try:
                results, failure = self._runner.run_parts(token, parts, at_once=at_once, done=done)
            finally:
                self._elsewhere = False
            return {"parts": results, "failure": failure}

        # A failure is recorded as a result: an error would lose the results of the other parts.
        ended = self.step(f"parts {token}", body)
        if ended.get("failure"):
            raise PartsFailedError(ended["failure"], ended["parts"])
        return list(ended["parts"])

    def check(self) -> None:
        """Raise if the job has to stop; see `JobContext`."""
        if self.interrupted.is_set():
            raise (JobsStopping if self._stopping() else JobCancelled)(self.operation_id)

    def failure(self, exc: Exception) -> JobFailedError:
        """Convert an error to the one that is stored, with the problem body that clients get."""
        if isinstance(exc, JobFailedError):
            return exc
        problem = problem_from(exc, instance=f"/v1/operations/{self.operation_id}")
        if problem.status >= 500:
            logger.error("operation %s failed", self.operation_id, exc_info=exc)
        return JobFailedError(problem.model_dump(mode="json"))

    def _with_retries(self, function: Callable[[], Result]) -> Result:
        """Call `function`, and again a few times while the store does not answer.

        Raises:
            StoreUnavailableError: The store did not answer the last call either.
            JobInterrupt: The job has to stop.
        """
        for pause in STEP_RETRY_SECONDS:
            self.check()
            try:
                return function()
            except StoreUnavailableError:
                logger.warning("operation %s: retrying", self.operation_id, exc_info=True)
                self.interrupted.wait(pause)
        self.check()
        return function()

    def _report(self, progress: dict[str, Any]) -> None:
        if not self._in_step:
            raise RuntimeError("progress is reported from within a step only")
        self.check()
        done = progress["done_bytes"]
        if not self._elsewhere:
            self._worked(max(0, done - self._counted))
        self._counted = done  # may shrink when a step starts over
        self._runner.report(progress)
