"""Kinds of jobs, and the context in which the engine runs them.

JobInterrupt (BaseException: no step may swallow or record it)
├── JobCancelled    the operation was cancelled
├── JobTakenOver    another worker runs the operation now
└── JobsStopping    the process is stopping; the job continues at the next start
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.service.jobs.progress import ProgressMeter
from cairn.storage.errors import RunNotFoundError
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store.disk.confinement import safe_join
from cairn.storage.store.uri import StoreURI

Request = Mapping[str, Any]
Result = dict[str, Any]


def step_request(
    root: str, run: Run, step: StepInfo, *, despite_damage: str | None = None
) -> dict[str, Any]:
    """Return the part of a job's request that identifies its checkpoint.

    Args:
        root: Name of the run's root.
        run: Run of the checkpoint.
        step: The checkpoint.
        despite_damage: Reason to use the step even if it is damaged; None: refuse a damaged step.
    """
    reason = {} if despite_damage is None else {"despite_damage": despite_damage}
    return {
        "root": root,
        "run": run.uri.name,
        "step": step.step,
        "attempt": step.attempt,
        "manifest_digest": step.manifest_digest,
        **reason,
    }


class JobInterrupt(BaseException):
    """Interrupt that unwinds a running step; nothing is recorded for the step."""


class JobCancelled(JobInterrupt):
    """The operation was cancelled: stop, and remove what was written."""


class JobTakenOver(JobInterrupt):
    """Another worker runs the operation now: leave everything to it."""


class JobsStopping(JobInterrupt):
    """The process is stopping: leave everything as it is, for the next start."""


class JobContext(ABC):
    """Context of a job's execution."""

    operation_id: str
    roots: Mapping[str, StoreURI]
    progress: ProgressMeter

    @abstractmethod
    def step(self, name: str, function: Callable[[], Result]) -> Result:
        """Run `function` once, record its JSON result and return it.

        After a crash, a recorded result is returned without a call. If the process dies in
        `function`, it runs again, so its effects must be idempotent. Everything that reads or
        writes a store, and every use of `progress`, belongs inside a step; a job's code between
        steps must be deterministic.

        Args:
            name: Name of the step.
            function: Body of the step.

        Raises:
            JobInterrupt: The operation was cancelled or the process is stopping.
        """

    @abstractmethod
    def parts(
        self, token: str, parts: Sequence[Result], *, at_once: int | None = None
    ) -> list[Result]:
        """Run each part once, on any free workers, and return their results in order.

        The kind's `part` does each part. Parts may run in other processes, several at a time, and
        each is a durable step: if a worker dies, only the parts that it ran are repeated. If a part
        fails, the others are cancelled, and its failure is raised.

        Args:
            token: Text that is unique to this set of parts; letters and digits.
            parts: JSON objects, each with its `name` and its `nbytes` of the progress.
            at_once: Largest number of parts at a time, over all workers; None: no limit.

        Raises:
            PartsFailedError: A part failed; the error has the results of the others.
            JobInterrupt: The operation was cancelled or the process is stopping.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise if the job has to stop. Long work calls this between two blocks.

        Raises:
            JobInterrupt: The operation was cancelled or the process is stopping.
        """


@dataclass(frozen=True)
class JobKind:
    """Kind of job.

    Attributes:
        name: The operation's `kind`.
        run: Function that does the work in steps of the context, and returns the result.
        abandon: Idempotent function that removes the unpublished files of a cancelled or failed
            operation, given (roots, request, operation id). None: there are no such files.
        leave: Function that is called in place of `abandon` if the operation failed because the
            store is full. It keeps the files that the next run can use. None: there are none.
        changed: Function that returns the name of the run whose lists the job changes, given the
            request. None: the job changes no list.
        part: Function that does one of the parts that `run` passes to `JobContext.parts`, in a step
            of its own, and returns the part's result. None: the kind has no parts.
    """

    name: str
    run: Callable[[JobContext, Request], Result]
    abandon: Callable[[Mapping[str, StoreURI], Request, str], None] | None = None
    changed: Callable[[Request], str] | None = None
    part: Callable[[JobContext, Request, Result], Result] | None = None
    leave: Callable[[Mapping[str, StoreURI], Request, str], None] | None = None


def run_place(roots: Mapping[str, StoreURI], request: Request) -> StoreURI:
    """Return the address of the run that a request names; the store is not read.

    Raises:
        RunNotFoundError: The run's root is no longer configured.
    """
    if request["root"] not in roots:
        raise RunNotFoundError(
            "the root is gone",
            path=request["root"],
            expected=f"one of {', '.join(roots)}",
            found="a job of a root that is configured no more",
            next_step="Configure or add the root again, then resume the operation.",
        )
    return safe_join(roots[request["root"]], request["run"])


def open_run(roots: Mapping[str, StoreURI], request: Request) -> Run:
    """Open the run that a request names.

    Raises:
        RunNotFoundError: The run is gone, or its root is no longer configured.
    """
    return Run.open(run_place(roots, request))
