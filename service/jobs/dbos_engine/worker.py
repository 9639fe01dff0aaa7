"""Worker that executes jobs: DBOS's executor, one per process."""

import builtins
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, PortableWorkflowError, WorkflowStatus
from dbos import error as dbos_errors
from sqlalchemy.exc import DBAPIError

from cairn.service.http.problems import problem_from
from cairn.service.jobs.context import (
    JobCancelled,
    JobInterrupt,
    JobKind,
    JobsStopping,
    JobTakenOver,
    Request,
    Result,
)
from cairn.service.jobs.dbos_engine.counts import JobCounts
from cairn.service.jobs.dbos_engine.database import (
    APPLICATION,
    APPLICATION_VERSION,
    LIMITS,
    PROGRESS_EVENT,
    engine_options,
)
from cairn.service.jobs.dbos_engine.limiter import Limiter
from cairn.service.jobs.dbos_engine.parts import Parts
from cairn.service.jobs.dbos_engine.waker import Waker
from cairn.service.jobs.errors import JobFailedError, JobsBusyError, OperationStateError
from cairn.service.jobs.execution import Execution
from cairn.service.jobs.observation import observe_job, observe_part
from cairn.service.jobs.records import CANCELLED, PART, state_of, workflow_name
from cairn.service.jobs.worker_names import WorkerName
from cairn.service.observability.metrics import JobMetrics
from cairn.service.schemas import OperationKind
from cairn.storage.store.uri import StoreURI


class ExpectedEndings(logging.Filter):
    """Log filter that drops DBOS's records about failed, cancelled and stopped jobs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True unless the record is about the expected end of a job."""
        ending = record.exc_info[1] if record.exc_info else None
        return not isinstance(ending, JobFailedError | JobInterrupt)


logger = logging.getLogger(__name__)

MAX_RECOVERIES: Final = 5
STOP_TIMEOUT_SECONDS: Final = 30.0
NOTICE_SECONDS: Final = 1.0
"""Interval at which DBOS notifies listeners of events in PostgreSQL, in seconds.

It need not be short: servers poll, so no process listens.
"""


class _Steps:
    """Steps, parts and progress in DBOS; only for threads in which DBOS runs a job."""

    def __init__(self, parts: Callable[[], Parts] | None = None) -> None:
        self._parts = parts

    def run_step(self, name: str, body: Callable[[], Result]) -> Result:
        try:
            return DBOS.run_step({"name": name}, body)
        except PortableWorkflowError as exc:  # raised before a restart, and replayed by DBOS
            if not isinstance(exc.data, dict):
                raise
            raise JobFailedError(exc.data) from exc

    def run_parts(
        self,
        token: str,
        parts: Sequence[Result],
        *,
        at_once: int | None,
        done: Callable[[int], None],
    ) -> tuple[list[Result | None], Result | None]:
        if self._parts is None:
            raise RuntimeError("a part has no parts")
        return self._parts().run(token, parts, at_once=at_once, done=done)

    def report(self, progress: dict[str, Any]) -> None:
        # Raises if the operation was cancelled, or if another worker has taken it over.
        try:
            DBOS.set_event(PROGRESS_EVENT, progress)
        except DBAPIError as exc:  # progress must not fail a job
            logger.warning("operation %s: progress is not told: %s", DBOS.workflow_id, exc.orig)


class Worker:
    """Executor of jobs; one per process.

    Args:
        database_url: URL of DBOS's own database, SQLite or PostgreSQL. `open_jobs` has opened it.
        name: Name of this worker, the same over restarts. The process has its lock while the worker
            runs.
        roots: Store roots by name.
        kinds: Kinds of jobs, by name.
        changed: Callback with root and name of each run whose lists a job has changed.
        metrics: Metrics of the jobs.
    """

    def __init__(
        self,
        *,
        database_url: str,
        name: WorkerName,
        roots: Mapping[str, StoreURI],
        kinds: Mapping[str, JobKind],
        changed: Callable[[str, str], None] | None = None,
        metrics: JobMetrics | None = None,
    ) -> None:
        self.roots = roots
        self.kinds = dict(kinds)
        self.stopping = False
        self._executions: set[Execution] = set()
        self._lock = threading.Lock()
        self._limiter = Limiter()
        self._database_url = database_url
        self.name = name
        self._changed = changed
        self._metrics = metrics or JobMetrics()
        self._counts = JobCounts(database_url)
        names = [workflow_name(kind) for kind in (*kinds, PART)]
        self._waker = Waker(lambda: self._counts.any_waits(names))

    def launch(self) -> None:
        """Open the database, resume the jobs that a crash or stop left, and wait for new ones.

        Raises:
            JobsBusyError: This process has a running engine already, or another process has its
                name.
            SettingsError: The lock of the name cannot be created.
        """
        global _current
        with _current_lock:
            if _current is not None:
                raise JobsBusyError(
                    "job engine: expected none in this process, found a running one. Close the "
                    "first application before starting a second."
                )
            # Before DBOS starts, since DBOS resumes all jobs of this name.
            self.name.acquire(self._lose)
            _current = self
        try:
            dbos = DBOS(config=self._config())
            self._waker.attach(dbos)
            DBOS.launch()
            self._waker.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the worker; running jobs stop at their next block.

        They continue when a worker of this name is launched again.
        """
        global _current
        self.stopping = True
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        running = self._running()
        for execution in running:
            execution.interrupted.set()
        for execution in running:
            if not execution.finished.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("operation %s did not stop in time", execution.operation_id)
        self._waker.close()
        self._counts.close()
        DBOS.destroy()
        # Release the name last: before that, no other process may resume the jobs of this one.
        with _current_lock:
            if _current is self:
                _current = None
                self.name.release()

    def _lose(self) -> None:
        """Close this worker, since another process has acquired its name."""
        threading.Thread(target=self.close, name="cairn-worker-end").start()

    def wake(self) -> None:
        """Make the queues poll for new jobs at once."""
        self._waker.wake()

    def interrupt(self, operation_id: str, *, only_parts: bool = False) -> bool:
        """Stop a cancelled operation and wait for its end; return False if it does not run here.

        Args:
            operation_id: Id of the operation.
            only_parts: Stop its parts, and not its job: a resumed job may wait here to begin.
        """
        here = [
            execution
            for execution in self._running()
            if execution.operation_id == operation_id and (execution.is_part or not only_parts)
        ]
        for execution in here:
            execution.interrupted.set()
        for execution in here:
            execution.finished.wait(STOP_TIMEOUT_SECONDS)
        return bool(here)

    def execute(self, kind: str, request: Request) -> Result:
        """Execute a job; DBOS calls this as the body of every job's workflow."""
        operation_id = _own_id()
        origin = self._started_by(operation_id)
        with observe_job(self._metrics, kind, operation_id, origin):
            execution = self._execution(kind, operation_id, _Steps(lambda: parts))
            parts = Parts(
                kind,
                operation_id,
                request,
                origin=dict(origin),
                wake=self.wake,
                stop=lambda: self.interrupt(operation_id, only_parts=True),
                interrupted=execution.interrupted,
            )
            return self._execute(
                execution,
                lambda: self._run(self.kinds[kind], execution, request),
                # A cancelled run of this operation may still end here while the resumed one begins.
                limits={kind: LIMITS[kind], operation_id: 1},
                cancelled=lambda: self._leave_off(execution, kind, request),
            )

    def execute_part(self, job: Request) -> Result:
        """Execute a part of a job; DBOS calls this as the body of every part's workflow.

        If the part is cancelled, its files stay: the process that cancelled it removes them.
        """
        kind, operation_id, part = self.kinds[job["kind"]], job["operation"], job["part"]
        own = kind.part
        if own is None:
            raise RuntimeError(f"jobs of the kind {kind.name!r} have no parts")
        limits = {PART: LIMITS[PART]}
        if (at_once := job.get("gather")) is not None:
            limits[f"parts of {operation_id}"] = at_once
        with observe_part(kind.name, operation_id, part["name"], self._started_by(_own_id())):
            execution = self._execution(kind.name, operation_id, _Steps(), is_part=True)

            def run() -> Result:
                self._check_open(operation_id)
                return execution.step(
                    f"part {part['name']}", lambda: own(execution, job["request"], part)
                )

            return self._execute(execution, run, limits=limits, cancelled=lambda: None)

    def _execution(
        self, kind: str, operation_id: str, steps: _Steps, *, is_part: bool = False
    ) -> Execution:
        return Execution(
            operation_id,
            roots=self.roots,
            runner=steps,
            stopping=lambda: self.stopping,
            worked=partial(self._metrics.worked, kind),
            is_part=is_part,
        )

    def _execute(
        self,
        execution: Execution,
        run: Callable[[], Result],
        *,
        limits: Mapping[str, int],
        cancelled: Callable[[], None],
    ) -> Result:
        """Wait until the limits allow it, then run a workflow that can be interrupted.

        Args:
            execution: Execution of the workflow.
            run: Function that does the work.
            limits: Largest numbers of workflows that run here at a time, by name.
            cancelled: Function that removes the workflow's files after it was cancelled.
        """
        with self._lock:
            self._executions.add(execution)
            if self.stopping:
                execution.interrupted.set()
        with ExitStack() as turn:  # until the files of a cancelled workflow are removed
            try:
                turn.enter_context(self._limiter.turn(limits, execution.check))
                return run()
            except (JobCancelled, JobsStopping, dbos_errors.DBOSBaseException) as exc:
                # Either this execution's own flag is set, or DBOS noticed between two steps that
                # the operation is no longer this worker's.
                workflow = self._workflow(_own_id())
                if workflow is not None and workflow.status == CANCELLED:
                    cancelled()
                    ending: type[JobInterrupt] = JobCancelled
                elif isinstance(exc, JobsStopping):
                    raise
                else:
                    ending = JobTakenOver
                # Do not raise DBOS's own error: it would make this thread wait for the end of the
                # operation. A resumed one may take long, and a waiting thread keeps the process
                # from ending.
                raise ending(execution.operation_id) from exc
            finally:
                with self._lock:
                    self._executions.discard(execution)
                execution.finished.set()

    def _run(self, kind: JobKind, execution: Execution, request: Request) -> Result:
        try:
            result = kind.run(execution, request)
            self._tell(kind, request)
            return result
        except Exception as exc:
            failure = execution.failure(exc)

            def clean_up() -> Result:
                # Raises if the operation is no longer this worker's.
                execution.progress.set(message="removing what was written")
                self._abandon(execution, kind.name, request, failure)
                return {}

            execution.step("clean up", clean_up)
            self._tell(kind, request)  # a failed job may have changed the run
            raise failure from exc

    def _leave_off(self, execution: Execution, kind: str, request: Request) -> None:
        self._abandon(execution, kind, request)
        self._tell(self.kinds[kind], request)  # a cancelled job may have changed the run

    def _abandon(
        self,
        execution: Execution,
        kind: str,
        request: Request,
        failure: JobFailedError | None = None,
    ) -> None:
        """Remove the files of an operation, after its parts in this process have stopped."""
        self.interrupt(execution.operation_id, only_parts=True)
        abandon(self.kinds[kind], self.roots, request, execution.operation_id, failure)

    def _tell(self, kind: JobKind, request: Request) -> None:
        """Report the run whose lists a job has changed, before the operation has ended.

        An error of the callback is logged and not raised.
        """
        if kind.changed is None or self._changed is None:
            return
        try:
            self._changed(request["root"], kind.changed(request))
        except Exception:
            logger.exception("%s: lists are behind until the store is looked at", request["root"])

    def _check_open(self, operation_id: str) -> None:
        """Raise if a part's operation has ended, so that nothing waits for the part's result.

        Raises:
            JobFailedError: The operation has ended while its part was being started.
        """
        workflow = self._workflow(operation_id)
        if workflow is None or state_of(workflow.status).final:
            gone = OperationStateError(f"operation {operation_id}: it has ended meanwhile")
            problem = problem_from(gone, instance=f"/v1/operations/{operation_id}")
            raise JobFailedError(problem.model_dump(mode="json", exclude_none=True))

    def _started_by(self, operation_id: str) -> Mapping[str, Any]:
        """Return the stored ids of the request that started a workflow; {}: none are stored."""
        workflow = self._workflow(operation_id)
        return {} if workflow is None else workflow.attributes or {}

    def _workflow(self, operation_id: str) -> WorkflowStatus | None:
        # In another thread, where no workflow runs, so that DBOS records no step.
        with ThreadPoolExecutor(1) as pool:
            workflows = pool.submit(
                DBOS.list_workflows,
                workflow_ids=[operation_id],
                load_input=False,
                load_output=False,
            ).result()
        return workflows[0] if workflows else None

    def _running(self) -> builtins.list[Execution]:
        with self._lock:
            return [*self._executions]

    def _config(self) -> DBOSConfig:
        return {
            "name": APPLICATION,
            "system_database_url": self._database_url,
            "application_version": APPLICATION_VERSION,
            "executor_id": self.name.name,
            "serializer": DBOSPortableJSONSerializer(),
            "enable_otlp": False,
            "log_level": "WARNING",
            "notification_listener_polling_interval_sec": 0.2,
            "notification_coalesce_sec": NOTICE_SECONDS,
            "db_engine_kwargs": engine_options(self._database_url),
        }


_current: Worker | None = None
_current_lock = threading.Lock()


def abandon(
    kind: JobKind,
    roots: Mapping[str, StoreURI],
    request: Request,
    operation_id: str,
    failure: JobFailedError | None = None,
) -> None:
    """Remove the files of a cancelled or failed operation; an error is logged and not raised.

    If the store was full, the files that the next run can use stay. `cairn gc` removes what
    remains.
    """
    resumable = failure is not None and failure.for_missing_space
    remove = (kind.leave if resumable else None) or kind.abandon
    if remove is None:
        return
    try:
        remove(roots, request, operation_id)
    except Exception:
        logger.exception("operation %s: could not remove what it left", operation_id)


def _register_workflow(kind: OperationKind) -> None:
    def job(request: dict[str, Any]) -> dict[str, Any]:
        engine = _current
        if engine is None:  # the worker was closed between DBOS's start of the job and this call
            raise JobsStopping(kind)
        return engine.execute(kind, request)

    DBOS.workflow(name=workflow_name(kind), max_recovery_attempts=MAX_RECOVERIES)(job)


def _part(job: dict[str, Any]) -> dict[str, Any]:
    engine = _current
    if engine is None:
        raise JobsStopping(PART)
    return engine.execute_part(job)


for _kind in OperationKind:
    _register_workflow(_kind)
DBOS.workflow(name=workflow_name(PART), max_recovery_attempts=MAX_RECOVERIES)(_part)


def _own_id() -> str:
    """Return the id of the workflow that this thread runs.

    Raises:
        RuntimeError: This thread runs no workflow.
    """
    workflow_id = DBOS.workflow_id
    if workflow_id is None:
        raise RuntimeError("a job runs inside a workflow only")
    return workflow_id


logging.getLogger("dbos").addFilter(ExpectedEndings())
