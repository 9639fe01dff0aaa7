"""What a kind of job is, and what it sees of the engine that runs it.

JobInterrupt (BaseException: no step may swallow or record it)
├── JobCancelled    the operation was cancelled
├── JobTakenOver    another worker runs the operation now
└── JobsStopping    the process is going down; the job goes on at the next start
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.service.jobs.progress import ProgressMeter
from cairn.storage.errors import RunNotFoundError
from cairn.storage.runs import Run, StepInfo
from cairn.storage.store import StoreURI, confine

Request = Mapping[str, Any]
Result = dict[str, Any]


def step_request(
    root: str, run: Run, step: StepInfo, *, despite_damage: str | None = None
) -> dict[str, Any]:
    """The part of every job's request that says which checkpoint it is about.

    Args:
        root: Name of the run's root.
        run: The run.
        step: The checkpoint.
        despite_damage: Why it is used though it is damaged; None: it is not, if it is.
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
    """Unwinds a running step; nothing is recorded for it."""


class JobCancelled(JobInterrupt):
    """The operation was cancelled: give up, and remove what was written."""


class JobTakenOver(JobInterrupt):
    """Another worker runs the operation now: leave everything to it."""


class JobsStopping(JobInterrupt):
    """The process is stopping: leave everything as it is, for the next start."""


class JobContext(ABC):
    """Handed to every execution of a job."""

    operation_id: str
    roots: Mapping[str, StoreURI]
    progress: ProgressMeter

    @abstractmethod
    def step(self, name: str, function: Callable[[], Result]) -> Result:
        """Run `function` once and keep its JSON result, also over a crash.

        It may run again if the process dies in it, so its effects must be idempotent.
        Everything that reads or writes a store, and every use of `progress`, belongs inside
        a step; a job's code between steps must be deterministic.

        Raises:
            JobInterrupt: The operation was cancelled or the process is stopping.
        """

    @abstractmethod
    def parts(
        self, token: str, parts: Sequence[Result], *, at_once: int | None = None
    ) -> list[Result]:
        """Have each part done once, by whichever workers are free; what they gave, in order.

        Each is handed to the kind's `part`, which may run in other processes, several at a time,
        and is a durable step of its own: a worker that dies costs the parts it had in hand. If one
        fails, the others are cancelled, and its failure is raised.

        Args:
            token: Another one whenever the parts are begun anew; letters and digits.
            parts: JSON objects, each with its `name` and its `nbytes` of the progress.
            at_once: Most that are done at a time, over all workers; None: as many as there are.

        Raises:
            PartsFailedError: One of them failed; it has what the others gave.
            JobInterrupt: The operation was cancelled or the process is stopping.
        """

    @abstractmethod
    def check(self) -> None:
        """Call between blocks of long work.

        Raises:
            JobInterrupt: The operation was cancelled or the process is stopping.
        """


@dataclass(frozen=True)
class JobKind:
    """One kind of job.

    Attributes:
        name: The operation's `kind`.
        run: Does the work through the context's steps; its return value is the result.
        abandon: Given (roots, request, operation id), removes what a cancelled or failed
            operation left unpublished. Idempotent.
        leave: The same for one that failed since the store is full: what its next run can go on
            with stays. None: nothing is of use.
        changed: Given the request, the name of the run whose lists the job changes; None: it
            changes none.
        part: Does one of the parts that `run` hands to `JobContext.parts`, within a step of its
            own; its return value is what comes back there. None: it has none.
    """

    name: str
    run: Callable[[JobContext, Request], Result]
    abandon: Callable[[Mapping[str, StoreURI], Request, str], None]
    changed: Callable[[Request], str] | None = None
    part: Callable[[JobContext, Request, Result], Result] | None = None
    leave: Callable[[Mapping[str, StoreURI], Request, str], None] | None = None


def open_run(roots: Mapping[str, StoreURI], request: Request) -> Run:
    """The run that a request names by its root and name.

    Raises:
        RunNotFoundError: The run is gone, or its root is configured no more.
    """
    if request["root"] not in roots:
        raise RunNotFoundError(
            "the root is gone",
            path=request["root"],
            expected=f"one of {', '.join(roots)}",
            found="a job of a root that is configured no more",
            next_step="Configure or add the root again, then resume the operation.",
        )
    return Run.open(confine(roots[request["root"]], request["run"]))
