"""One run of a job in this process: its steps, its progress, its interruption."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from cairn.service.http import problem_from
from cairn.service.jobs.context import JobCancelled, JobContext, JobsStopping, Result
from cairn.service.jobs.errors import JobFailedError, PartsFailedError
from cairn.service.jobs.progress import ProgressMeter
from cairn.service.observing import span
from cairn.storage.errors import StoreUnavailableError
from cairn.storage.store import StoreURI

logger = logging.getLogger(__name__)

STEP_RETRY_SECONDS: Final = (0.5, 1.0, 2.0)


class StepRunner(Protocol):
    """What an execution needs of the engine below it."""

    def run_step(self, name: str, body: Callable[[], Result]) -> Result:
        """Run `body` once and keep its result, or give back what was kept."""

    def run_parts(
        self,
        token: str,
        parts: Sequence[Result],
        *,
        at_once: int | None,
        done: Callable[[int], None],
    ) -> tuple[list[Result | None], Result | None]:
        """Have other workflows do `parts`; see `JobContext.parts`.

        What each gave, None if it was not done; and the problem of one that failed, if any did.

        Args:
            token: As there.
            parts: As there.
            at_once: As there.
            done: Called now and then with the bytes that are done; what it raises ends the waiting.
        """

    def report(self, progress: dict[str, Any]) -> None:
        """Store the progress of the operation whose step this thread runs.

        Raises:
            BaseException: The operation is this execution's no more.
        """


class Execution(JobContext):
    """What a job gets as its context.

    Attributes:
        finished: Set once the job has ended here, cleaned up where it had to.
        interrupted: Set to make it stop.
        is_part: It does a part of the operation's job.
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
            JobFailedError: It failed; the store was asked again a few times.
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
        """Have each of them done once; see `JobContext`.

        Raises:
            PartsFailedError: One of them failed.
        """
        before = self.progress.done_bytes

        def done(nbytes: int) -> None:
            self.check()
            self.progress.set(done_bytes=before + nbytes)

        def body() -> Result:
            self._elsewhere = True  # who does a part counts its bytes
            total = before + sum(int(part["nbytes"]) for part in parts)
            self.progress.set(total_bytes=total, message=f"writing {len(parts)} files")
            try:
                found, failure = self._runner.run_parts(token, parts, at_once=at_once, done=done)
            finally:
                self._elsewhere = False
            return {"parts": found, "failure": failure}

        # A failure is kept as a result: else what the other parts gave would be lost.
        ended = self.step(f"parts {token}", body)
        if ended.get("failure"):
            raise PartsFailedError(ended["failure"], ended["parts"])
        return list(ended["parts"])

    def check(self) -> None:
        """Raise if it is to stop; see `JobContext`."""
        if self.interrupted.is_set():
            raise (JobsStopping if self._stopping() else JobCancelled)(self.operation_id)

    def failure(self, exc: Exception) -> JobFailedError:
        """The error to store, with the problem that the client gets."""
        if isinstance(exc, JobFailedError):
            return exc
        problem = problem_from(exc, instance=f"/v1/operations/{self.operation_id}")
        if problem.status >= 500:
            logger.error("operation %s failed", self.operation_id, exc_info=exc)
        return JobFailedError(problem.model_dump(mode="json", exclude_none=True))

    def _with_retries(self, function: Callable[[], Result]) -> Result:
        """Call `function` again while the store does not answer, a few times."""
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
        self._counted = done  # less than before where a step begins anew
        self._runner.report(progress)
