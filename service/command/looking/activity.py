"""What is going on at a control plane, look by look: runs, saves in flight, jobs.

The API tells how far each is, not how fast: a rate is what came between two looks.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice
from typing import Any, Final

from cairn.service.client.client import Client
from cairn.service.client.protocol import DEFAULT_ROOT
from cairn.service.errors import ProblemResponseError
from cairn.service.schemas import CheckpointState, Operation, OperationState, Run

_LARGEST_PAGE: Final = 100
_WHOLE: Final = (CheckpointState.LISTED, CheckpointState.DAMAGED)


@dataclass(frozen=True)
class Rated:
    """Something that grows.

    Attributes:
        bytes: Done so far.
        total: Of how many; None if nobody knows.
        rate: Bytes a second since the look before; None at the first one.
    """

    bytes: int
    total: int | None
    rate: float | None


@dataclass(frozen=True)
class SaveInFlight:
    """A step that is being written.

    Attributes:
        root, run, step, attempt: Its own.
        written: What the store has of it; `total` is what it has of the latest step. None if it
            does not answer.
    """

    root: str
    run: str
    step: int
    attempt: int
    written: Rated | None


@dataclass(frozen=True)
class Activity:
    """One look.

    Attributes:
        runs: Those that were asked for.
        more: Whether there are others.
        saves: In these runs.
        jobs: That have not ended, newest first, and how far each is.
    """

    runs: Sequence[Run]
    more: bool
    saves: Sequence[SaveInFlight]
    jobs: Sequence[tuple[Operation, Rated]]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "runs": [run.model_dump(mode="json") for run in self.runs],
            "more_runs": self.more,
            "saves": [
                {
                    "root": save.root,
                    "run": save.run,
                    "step": save.step,
                    "attempt": save.attempt,
                    "bytes": None if save.written is None else save.written.bytes,
                    "latest_bytes": None if save.written is None else save.written.total,
                }
                for save in self.saves
            ],
            "operations": [job.model_dump(mode="json") for job, _ in self.jobs],
        }


@dataclass
class Looks:
    """Looks at a control plane, one after the other.

    Attributes:
        client: Of it.
        root: Look at runs of this root only.
        names: Look at these runs only; empty: at those that were made last.
        most: At most so many runs.
        clock: Seconds.
    """

    client: Client
    root: str | None
    names: Sequence[str]
    most: int
    clock: Callable[[], float] = time.monotonic
    _before: dict[Hashable, tuple[float, int]] = field(default_factory=dict)

    def look(self) -> Activity:
        """What is going on now.

        Raises:
            ProblemResponseError, ServerUnreachableError: The control plane does not say.
        """
        seen: dict[Hashable, tuple[float, int]] = {}
        runs, more = self._runs()
        saves = [save for run in runs for save in self._saves(run, seen)]
        jobs = []
        for state in (OperationState.RUNNING, OperationState.PENDING):
            for job in self.client.operations(state=state):
                done = job.progress.done_bytes
                jobs.append((job, self._rated(job.id, done, job.progress.total_bytes, seen)))
        self._before = seen
        return Activity(runs, more, saves, jobs)

    def _runs(self) -> tuple[list[Run], bool]:
        if self.names:
            root = self.root or DEFAULT_ROOT
            return [self.client.run(name, root=root) for name in self.names], False
        newest = self.client.runs(
            root=self.root, order_by="created desc", page_size=min(self.most + 1, _LARGEST_PAGE)
        )
        found = list(islice(newest, self.most + 1))
        return found[: self.most], len(found) > self.most

    def _saves(self, run: Run, seen: dict[Hashable, tuple[float, int]]) -> list[SaveInFlight]:
        in_flight = list(
            self.client.checkpoints(run.name, root=run.root, state=CheckpointState.IN_FLIGHT)
        )
        if not in_flight:
            return []
        sizes, latest = self._sizes(run)
        return [
            SaveInFlight(
                root=run.root,
                run=run.name,
                step=one.step,
                attempt=one.attempt,
                written=None
                if sizes is None
                else self._rated(
                    (run.root, run.name, one.step, one.attempt),
                    sizes.get((one.step, one.attempt), 0),
                    latest,
                    seen,
                ),
            )
            for one in in_flight
        ]

    def _sizes(self, run: Run) -> tuple[dict[tuple[int, int], int] | None, int | None]:
        """What the store has of each step, and of the latest that is whole.

        Nobody else knows, so it is asked, but only where a save is under way.
        """
        try:
            steps = self.client.usage(run.name, root=run.root).steps
        except ProblemResponseError as error:
            if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            return None, None  # the store is away; what the catalog knows is shown all the same
        whole = [one for one in steps if one.state in _WHOLE]
        latest = max(whole, key=lambda one: one.step, default=None)
        sizes = {(one.step, one.attempt): one.bytes for one in steps}
        return sizes, None if latest is None else latest.bytes

    def _rated(
        self,
        key: Hashable,
        done: int,
        total: int | None,
        seen: dict[Hashable, tuple[float, int]],
    ) -> Rated:
        now = self.clock()
        seen[key] = now, done
        if key not in self._before:
            return Rated(done, total, None)
        then, before = self._before[key]
        return Rated(done, total, max(0, done - before) / (now - then) if now > then else None)
