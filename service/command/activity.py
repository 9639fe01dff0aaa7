"""Snapshots of a control plane's activity: runs, saves in flight, jobs.

The API reports progress, not speed: a rate is the difference between two snapshots.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice
from typing import Any, Final

from cairn.service.client.client import Client
from cairn.service.command.addresses import RunPlace
from cairn.service.errors import ProblemResponseError
from cairn.service.schemas import CheckpointState, Operation, OperationState, Run

_LARGEST_PAGE: Final = 100
_WHOLE: Final = (CheckpointState.LISTED, CheckpointState.DAMAGED)


@dataclass(frozen=True)
class ByteProgress:
    """Progress in bytes, with its rate.

    Attributes:
        bytes: Bytes done so far.
        total: Expected bytes; None if unknown.
        rate: Bytes per second since the snapshot before; None in the first one.
    """

    bytes: int
    total: int | None
    rate: float | None


@dataclass(frozen=True)
class SaveInFlight:
    """Step that a job is writing.

    Attributes:
        root, run, step, attempt: Name of the step.
        written: Bytes of the step in the store; `total` has those of the latest complete step. None
            if the store does not answer.
    """

    root: str
    run: str
    step: int
    attempt: int
    written: ByteProgress | None


@dataclass(frozen=True)
class Activity:
    """Snapshot of a control plane's activity.

    Attributes:
        runs: Requested runs.
        more: True if there are other runs.
        saves: Saves in flight in these runs.
        jobs: Running and then pending jobs, each newest first, with their progress.
    """

    runs: Sequence[Run]
    more: bool
    saves: Sequence[SaveInFlight]
    jobs: Sequence[tuple[Operation, ByteProgress]]

    def document(self) -> dict[str, Any]:
        """Return the snapshot as a JSON document."""
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
class SnapshotSource:
    """Source of snapshots, which remembers the last one to compute rates.

    Attributes:
        client: Client of the control plane.
        root: Only runs of this root.
        places: Only these runs; None: the newest runs.
        most: Largest number of runs.
        clock: Monotonic time in seconds.
    """

    client: Client
    root: str | None
    places: Sequence[RunPlace] | None
    most: int
    clock: Callable[[], float] = time.monotonic
    _before: dict[Hashable, tuple[float, int]] = field(default_factory=dict)

    def snapshot(self) -> Activity:
        """Take a snapshot.

        Raises:
            ProblemResponseError: The control plane refuses a request.
            ServerUnreachableError: The control plane does not answer.
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
        if self.places is not None:
            return [self.client.run(place.run, root=place.root) for place in self.places], False
        newest = self.client.runs(
            root=self.root, order_by="created desc", page_size=min(self.most + 1, _LARGEST_PAGE)
        )
        runs = list(islice(newest, self.most + 1))
        return runs[: self.most], len(runs) > self.most

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
                step=checkpoint.step,
                attempt=checkpoint.attempt,
                written=None
                if sizes is None
                else self._rated(
                    (run.root, run.name, checkpoint.step, checkpoint.attempt),
                    sizes.get((checkpoint.step, checkpoint.attempt), 0),
                    latest,
                    seen,
                ),
            )
            for checkpoint in in_flight
        ]

    def _sizes(self, run: Run) -> tuple[dict[tuple[int, int], int] | None, int | None]:
        """Read the bytes of each step from the store, and those of the latest complete step.

        Only the store knows the size of a step in flight. The first is None if the store does not
        answer, the second also if the run has no complete step.
        """
        try:
            steps = self.client.usage(run.name, root=run.root).steps
        except ProblemResponseError as error:
            if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            return None, None  # without its store, the catalog's part is still shown
        whole = [step for step in steps if step.state in _WHOLE]
        latest = max(whole, key=lambda step: step.step, default=None)
        sizes = {(step.step, step.attempt): step.bytes for step in steps}
        return sizes, None if latest is None else latest.bytes

    def _rated(
        self,
        key: Hashable,
        done: int,
        total: int | None,
        seen: dict[Hashable, tuple[float, int]],
    ) -> ByteProgress:
        now = self.clock()
        seen[key] = now, done
        if key not in self._before:
            return ByteProgress(done, total, None)
        then, before = self._before[key]
        return ByteProgress(
            done, total, max(0, done - before) / (now - then) if now > then else None
        )
