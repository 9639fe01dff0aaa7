"""Parts of a job, each a workflow of its own that any worker may execute.

One step of the job starts and watches the parts. Their ids are deterministic, so if that step runs
again after a crash, it does not start a part twice.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from dbos import DBOS, WorkflowStatus

from cairn.service.jobs.context import Request, Result
from cairn.service.jobs.dbos_engine.database import APPLICATION_VERSION, PROGRESS_EVENT, queue_of
from cairn.service.jobs.records import PART, failure_of, part_id, state_of, workflow_name
from cairn.service.schemas import OperationState

POLL_SECONDS = 0.1
"""Shortest interval between two checks of the parts."""

MAX_POLL_SECONDS: Final = 1.0


class Parts:
    """Runner of a job's parts; only for the thread in which DBOS runs the job.

    Args:
        kind: Kind of the job.
        operation_id: Id of the operation.
        request: Request of the job.
        origin: Ids of the request that started the job, see `observation.origin`.
        wake: Function that makes workers poll for new parts at once.
        stop: Function that stops the parts that run in this process, and waits for them.
        interrupted: Event that is set when the job has to stop.
    """

    def __init__(
        self,
        kind: str,
        operation_id: str,
        request: Request,
        *,
        origin: dict[str, Any],
        wake: Callable[[], None],
        stop: Callable[[], object],
        interrupted: threading.Event,
    ) -> None:
        self._operation_id = operation_id
        self._job = {"kind": kind, "operation": operation_id, "request": dict(request)}
        self._origin = origin
        self._wake = wake
        self._stop = stop
        self._interrupted = interrupted

    def run(
        self,
        token: str,
        parts: Sequence[Result],
        *,
        at_once: int | None,
        done: Callable[[int], None],
    ) -> tuple[list[Result | None], Result | None]:
        """Run the parts; if one fails, cancel the others.

        Arguments and return values are those of `StepRunner.run_parts`.
        """
        ids = [part_id(self._operation_id, token, number) for number in range(len(parts))]
        sizes = {name: int(part["nbytes"]) for name, part in zip(ids, parts, strict=True)}
        most = len(parts) if at_once is None else at_once
        pause = POLL_SECONDS
        # DBOS records a call within a workflow as a step of the job, but not a call in another
        # thread.
        with ThreadPoolExecutor(1, "cairn-parts") as outside:
            workflows = outside.submit(_statuses, ids).result()
            while True:
                failure = self._failure(workflows, outside)
                ended = [workflow for workflow in workflows.values() if _succeeded(workflow)]
                if failure is not None or len(ended) == len(parts):
                    return outside.submit(_results, ids).result(), failure
                waiting = [name for name in ids if name not in workflows]
                room = max(0, most - (len(workflows) - len(ended)))
                for name in waiting[:room]:
                    part = parts[ids.index(name)]
                    outside.submit(self._start, name, part, at_once).result()
                if waiting[:room]:
                    self._wake()
                running = [
                    workflow for workflow in workflows.values() if workflow.status == "PENDING"
                ]
                written = outside.submit(_written, running).result()
                done(sum(sizes[workflow.workflow_id] for workflow in ended) + written)
                self._interrupted.wait(pause)
                pause = min(pause * 1.5, MAX_POLL_SECONDS)
                before, workflows = len(ended), outside.submit(_statuses, ids).result()
                if sum(map(_succeeded, workflows.values())) > before:
                    pause = POLL_SECONDS

    def _start(self, name: str, part: Result, at_once: int | None) -> None:
        DBOS.enqueue_workflow_with_options(
            {
                "workflow_name": workflow_name(PART),
                "queue_name": queue_of(PART),
                "workflow_id": name,
                "app_version": APPLICATION_VERSION,
                "attributes": self._origin,
            },
            {**self._job, "part": part, "gather": at_once},
        )

    def _failure(
        self, workflows: dict[str, WorkflowStatus], outside: ThreadPoolExecutor
    ) -> Result | None:
        """Stop the other parts if a part has failed, and return its problem; None: no failure."""
        ended = {
            name: workflow
            for name, workflow in workflows.items()
            if state_of(workflow.status).final
        }
        failed = [name for name, workflow in ended.items() if not _succeeded(workflow)]
        if not failed:
            return None
        others = [name for name in workflows if name not in ended]
        outside.submit(DBOS.cancel_workflows, others).result()
        self._stop()
        (row,) = outside.submit(_full_rows, failed[:1]).result()
        data = getattr(row.error, "data", None)
        instance = f"/v1/operations/{self._operation_id}"
        problem = failure_of(row.status, data, instance)
        return problem.model_dump(mode="json", exclude_none=True)


def _succeeded(workflow: WorkflowStatus) -> bool:
    return state_of(workflow.status) is OperationState.SUCCEEDED


def _statuses(ids: list[str]) -> dict[str, WorkflowStatus]:
    rows = DBOS.list_workflows(workflow_ids=ids, load_input=False, load_output=False)
    return {row.workflow_id: row for row in rows}


def _full_rows(ids: list[str]) -> list[WorkflowStatus]:
    return DBOS.list_workflows(workflow_ids=ids, load_input=False)


def _results(ids: list[str]) -> list[Result | None]:
    rows = [row for row in _full_rows(ids) if _succeeded(row)]
    outputs = {row.workflow_id: dict(row.output or {}) for row in rows}
    return [outputs.get(name) for name in ids]


def _written(running: list[WorkflowStatus]) -> int:
    reports = [
        DBOS.get_event(workflow.workflow_id, PROGRESS_EVENT, timeout_seconds=0) or {}
        for workflow in running
    ]
    return sum(int(report.get("done_bytes", 0)) for report in reports)
