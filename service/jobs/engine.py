"""Durable jobs on DBOS: the only module that imports it.

One engine per process. A job's operation id is DBOS's workflow id; its progress is a workflow
event; its steps are DBOS steps, so that what was done before a crash is not done again.

Longer than other files here, so that DBOS stays behind one door: what a version of it changes is
mended in this file alone.
"""

import builtins
import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from dbos import (
    DBOS,
    DBOSClient,
    DBOSConfig,
    DBOSPortableJSONSerializer,
    EnqueueOptions,
    PortableWorkflowError,
    WorkflowStatus,
)
from dbos import error as dbos_errors
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from cairn.service.errors import SettingsError
from cairn.service.jobs.context import (
    JobCancelled,
    JobInterrupt,
    JobKind,
    JobsStopping,
    JobTakenOver,
    Request,
    Result,
)
from cairn.service.jobs.errors import (
    IdempotencyKeyReusedError,
    JobFailedError,
    JobsBusyError,
    OperationNotFoundError,
    OperationStateError,
)
from cairn.service.jobs.execution import Execution
from cairn.service.jobs.executor_lock import ExecutorLock
from cairn.service.jobs.kinds import KINDS
from cairn.service.jobs.records import (
    CANCELLED,
    moment,
    operation_id,
    operation_of,
    statuses_of,
    workflow_name,
)
from cairn.service.schemas import Operation, OperationKind, OperationState
from cairn.service.settings import Settings
from cairn.storage.store import StoreURI


class WalConnection(sqlite3.Connection):
    """A connection in WAL mode; hand it to SQLAlchemy as `connect_args={"factory": ...}`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA busy_timeout=30000").close()
        self.execute("PRAGMA journal_mode=WAL").close()
        self.execute("PRAGMA synchronous=NORMAL").close()


class ExpectedEndings(logging.Filter):
    """Drops records of the engine about failed, cancelled and stopped jobs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is news."""
        ending = record.exc_info[1] if record.exc_info else None
        return not isinstance(ending, JobFailedError | JobInterrupt)


logger = logging.getLogger(__name__)

APPLICATION: Final = "cairn"
QUEUE: Final = "cairn-jobs"
# Part of what makes a stored job resumable: raise it only when old jobs must not go on with new
# code, and let them finish first.
APPLICATION_VERSION: Final = "1"
QUEUE_POLL_SECONDS: Final = 0.1
MAX_RECOVERIES: Final = 5
STOP_TIMEOUT_SECONDS: Final = 30.0
SMALLEST_CHUNK: Final = 50
PROGRESS_EVENT: Final = "progress"


class _Steps:
    """Steps and progress, as DBOS keeps them; only for threads that DBOS runs a job in."""

    def run_step(self, name: str, body: Callable[[], Result]) -> Result:
        try:
            return DBOS.run_step({"name": name}, body)
        except PortableWorkflowError as exc:  # it had failed before a restart
            if not isinstance(exc.data, dict):
                raise
            raise JobFailedError(exc.data) from exc

    def report(self, progress: dict[str, Any]) -> None:
        # Fails once the operation was cancelled or taken over elsewhere.
        DBOS.set_event(PROGRESS_EVENT, progress)


class JobEngine:
    """Starts, watches and steers jobs.

    Args:
        database_url: DBOS's own database; SQLite or PostgreSQL.
        executor_id: Name of this worker; the same over restarts, unique among live workers.
        roots: Store roots by name.
        kinds: What can be started.
        concurrency: Jobs that run at once in this process.
        lock: Held while the engine runs, so that no other process has its name.
        changed: Told of each run, by root and name, whose lists a job has changed.
    """

    def __init__(
        self,
        *,
        database_url: str,
        executor_id: str,
        roots: Mapping[str, StoreURI],
        kinds: Mapping[str, JobKind],
        concurrency: int = 2,
        lock: ExecutorLock | None = None,
        changed: Callable[[str, str], None] | None = None,
    ) -> None:
        self.roots = dict(roots)
        self.kinds = dict(kinds)
        self.stopping = False
        self._executions: set[Execution] = set()
        self._lock = threading.Lock()
        self._database_url = database_url
        self._executor_id = executor_id
        self._concurrency = concurrency
        self._lock_of_name = lock
        self._changed = changed

    def launch(self) -> None:
        """Open the database, take up the jobs that a crash or stop left, and wait for new ones.

        Raises:
            JobsBusyError: This process has a running engine already, or another has its name.
            SettingsError: The lock cannot be made.
        """
        global _current
        with _current_lock:
            if _current is not None:
                raise JobsBusyError(
                    "job engine: expected none in this process, found a running one. Close the "
                    "first application before starting a second."
                )
            if self._lock_of_name is not None:
                self._lock_of_name.acquire()
            _current = self
        try:
            self._make_queue()
            DBOS(config=self._config())
            DBOS.launch()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop: running jobs leave off at their next block, and go on at the next launch."""
        global _current
        self.stopping = True
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        running = self._running()
        for execution in running:
            execution.interrupted.set()
        for execution in running:
            if not execution.finished.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("operation %s did not stop in time", execution.operation_id)
        DBOS.destroy()
        with _current_lock:
            if _current is self:
                _current = None
                if self._lock_of_name is not None:
                    self._lock_of_name.release()

    def start(
        self, kind: str, request: Request, *, idempotency_key: str | None = None
    ) -> Operation:
        """Start a job, or find the one that is meant.

        Without a key, and while an operation has not ended, the same kind and request are the same
        operation.

        Args:
            kind: Key of `kinds`.
            request: JSON object handed to the job.
            idempotency_key: The same key is the same operation, for good; no other key is.

        Raises:
            IdempotencyKeyReusedError: The key was used for another request.
        """
        options: EnqueueOptions = {
            "workflow_name": workflow_name(kind),
            "queue_name": QUEUE,
            "workflow_id": operation_id(idempotency_key),
            "app_version": APPLICATION_VERSION,
        }
        identity = json.dumps([kind, dict(request)], sort_keys=True)
        shared: EnqueueOptions = {
            **options,
            "deduplication_id": hashlib.sha256(identity.encode()).hexdigest(),
            "duplication_policy": "return-existing" if idempotency_key is None else "reject",
        }
        try:
            handle = DBOS.enqueue_workflow_with_options(shared, dict(request))
        except dbos_errors.DBOSQueueDeduplicatedError:
            # An equal one is under way under another id, which would not answer to the key later.
            handle = DBOS.enqueue_workflow_with_options(options, dict(request))
        operation = self.get(handle.get_workflow_id())
        if operation.kind != kind or operation.request != dict(request):
            raise IdempotencyKeyReusedError(
                f"Idempotency-Key {idempotency_key!r}: expected the request of operation "
                f"{operation.id} again, found another one. Use a new key for a new request."
            )
        return operation

    def get(self, operation_id: str) -> Operation:
        """The operation as it stands now.

        Raises:
            OperationNotFoundError: There is none of that id.
        """
        found = DBOS.list_workflows(workflow_ids=[operation_id], name=self._names())
        if not found:
            raise OperationNotFoundError(f"operation {operation_id}: expected one, found none")
        return self._describe(found[0])

    def list(
        self,
        *,
        limit: int,
        after: tuple[datetime, str] | None = None,
        state: OperationState | None = None,
    ) -> builtins.list[Operation]:
        """Operations, newest first.

        Args:
            limit: At most this many.
            after: Only those that come after the one with this `created` and id.
            state: Only those in this state.
        """
        found: dict[tuple[datetime, str], WorkflowStatus] = {}
        size, offset = max(limit, SMALLEST_CHUNK), 0
        while True:
            chunk = DBOS.list_workflows(
                name=self._names(),
                limit=size,
                offset=offset,
                end_time=(after[0] + timedelta(milliseconds=1)).isoformat() if after else None,
                status=statuses_of(state) or None,
                sort_desc=True,
            )
            for status in chunk:
                key = (moment(status.created_at), status.workflow_id)
                if after is None or key < after:
                    found[key] = status
            # SQLite keeps seconds only: several operations may share one moment, and come in any
            # order within it; ids settle it. A page is full once all of its last moment are there.
            newest = sorted(found, reverse=True)[:limit]
            if len(chunk) < size or (
                len(newest) == limit and moment(chunk[-1].created_at) < newest[-1][0]
            ):
                return [self._describe(found[key]) for key in newest]
            offset += size

    def cancel(self, operation_id: str) -> Operation:
        """Cancel; a running job stops at its next block and removes what it wrote.

        Cancelling a cancelled operation changes nothing.

        Raises:
            OperationNotFoundError: There is none of that id.
            OperationStateError: It has ended otherwise.
        """
        operation = self.get(operation_id)
        if not operation.state.final:
            DBOS.cancel_workflow(operation_id)
            operation = self.get(operation_id)
        if operation.state is not OperationState.CANCELLED:
            raise OperationStateError(
                f"operation {operation_id}: expected one that has not ended, found it "
                f"{operation.state.value}"
            )
        here = [each for each in self._running() if each.operation_id == operation_id]
        for execution in here:
            execution.interrupted.set()
        for execution in here:
            execution.finished.wait(STOP_TIMEOUT_SECONDS)
        if not here:  # never started, left by a dead worker, or running elsewhere
            self._abandon(self.kinds[operation.kind], operation.request, operation_id)
        return operation

    def resume(self, operation_id: str) -> Operation:
        """Run a failed or cancelled operation again, from its start, under the same id.

        Raises:
            OperationNotFoundError: There is none of that id.
            OperationStateError: It is under way or has succeeded.
        """
        operation = self.get(operation_id)
        if operation.state not in (OperationState.FAILED, OperationState.CANCELLED):
            raise OperationStateError(
                f"operation {operation_id}: expected a failed or cancelled one, found it "
                f"{operation.state.value}"
            )
        try:
            DBOS.rewind_workflow(operation_id, queue_name=QUEUE)
        except dbos_errors.DBOSException as exc:
            raise OperationStateError(
                f"operation {operation_id}: expected a failed or cancelled one, found it resumed "
                "by another request"
            ) from exc
        return self.get(operation_id)

    def check(self) -> None:
        """Raise unless the database answers."""
        DBOS.list_workflows(name=self._names(), limit=1, load_input=False, load_output=False)

    def execute(self, kind: str, request: Request) -> Result:
        """The body of every workflow; DBOS calls it."""
        operation_id = DBOS.workflow_id
        if operation_id is None:
            raise RuntimeError("a job runs inside a workflow only")
        execution = Execution(
            operation_id, roots=self.roots, runner=_Steps(), stopping=lambda: self.stopping
        )
        with self._lock:
            self._executions.add(execution)
            if self.stopping:
                execution.interrupted.set()
        try:
            return self._run(self.kinds[kind], execution, request)
        except (JobCancelled, JobsStopping, dbos_errors.DBOSBaseException) as exc:
            # Our own flag, or DBOS noticing at a step's border that the row is not ours any more.
            cancelled = self._is_cancelled(operation_id)
            if cancelled:
                self._abandon(self.kinds[kind], request, operation_id)
            elif isinstance(exc, JobsStopping):
                raise
            # Past DBOS, which would keep this thread waiting for the end of the operation: a
            # resumed one may take long, and a thread that waits keeps the process from ending.
            raise (JobCancelled if cancelled else JobTakenOver)(operation_id) from exc
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
                execution.progress.set(message="removing what was written")  # only if still ours
                self._abandon(kind, request, execution.operation_id)
                return {}

            execution.step("clean up", clean_up)
            self._tell(kind, request)  # it may have done a part
            raise failure from exc

    def _tell(self, kind: JobKind, request: Request) -> None:
        """Tell of the run that a job has changed, before the operation counts as ended."""
        if kind.changed is None or self._changed is None:
            return
        try:
            self._changed(request["root"], kind.changed(request))
        except Exception:
            logger.exception("%s: lists are behind until the store is looked at", request["root"])

    def _abandon(self, kind: JobKind, request: Request, operation_id: str) -> None:
        try:
            kind.abandon(self.roots, request, operation_id)
        except Exception:
            logger.exception("operation %s: could not remove what it left", operation_id)

    def _is_cancelled(self, operation_id: str) -> bool:
        found = _outside_workflow(
            lambda: DBOS.list_workflows(
                workflow_ids=[operation_id], load_input=False, load_output=False
            )
        )
        return bool(found) and found[0].status == CANCELLED

    def _running(self) -> builtins.list[Execution]:
        with self._lock:
            return [*self._executions]

    def _names(self) -> builtins.list[str]:
        return [workflow_name(kind) for kind in self.kinds]

    def _describe(self, status: WorkflowStatus) -> Operation:
        return operation_of(
            workflow_id=status.workflow_id,
            name=status.name,
            status=status.status,
            request=status.input["args"][0] if status.input else {},
            progress=DBOS.get_all_events(status.workflow_id).get(PROGRESS_EVENT) or {},
            output=status.output,
            error_data=getattr(status.error, "data", None),
            created_ms=status.created_at,
            updated_ms=status.updated_at,
        )

    def _make_queue(self) -> None:
        """Before the launch: DBOS looks for queues then, and for new ones a second later."""
        DBOS.migrate(self._database_url)
        client = DBOSClient(
            system_database_url=self._database_url,
            application_name=APPLICATION,
            retry_connection_errors=False,
            lazy=True,
        )
        try:
            client.register_queue(
                QUEUE,
                worker_concurrency=self._concurrency,
                polling_interval_sec=QUEUE_POLL_SECONDS,
            )
        finally:
            client.destroy()

    def _config(self) -> DBOSConfig:
        config: DBOSConfig = {
            "name": APPLICATION,
            "system_database_url": self._database_url,
            "application_version": APPLICATION_VERSION,
            "executor_id": self._executor_id,
            "serializer": DBOSPortableJSONSerializer(),
            "enable_otlp": False,
            "log_level": "WARNING",
            "notification_listener_polling_interval_sec": 0.2,
        }
        if make_url(self._database_url).get_backend_name() == "sqlite":
            config["db_engine_kwargs"] = {"connect_args": {"factory": WalConnection}}
        return config


_T = TypeVar("_T")

_current: JobEngine | None = None
_current_lock = threading.Lock()


def launch(settings: Settings, *, changed: Callable[[str, str], None] | None = None) -> JobEngine:
    """Start the job engine of this process.

    Args:
        settings: Of the server.
        changed: Told of each run, by root and name, whose lists a job has changed.

    Raises:
        JobsBusyError: It has one already, or another process has its executor id.
        SettingsError: Its database or data folder cannot be opened.
    """
    engine = JobEngine(
        database_url=settings.jobs_database_url,
        executor_id=settings.executor_id,
        roots=settings.root_uris,
        kinds=KINDS,
        lock=ExecutorLock(settings.data_dir, settings.executor_id),
        changed=changed,
    )
    try:
        engine.launch()
    except DBAPIError as exc:
        raise SettingsError(
            f"CAIRN_JOBS_DATABASE_URL: {make_url(settings.jobs_database_url)!r} cannot be opened: "
            f"{exc.orig}. Check that it runs, and that this user may write it."
        ) from exc
    return engine


def _register_workflow(kind: OperationKind) -> None:
    def job(request: dict[str, Any]) -> dict[str, Any]:
        engine = _current
        if engine is None:  # closed between DBOS taking the job and starting it
            raise JobsStopping(kind)
        return engine.execute(kind, request)

    DBOS.workflow(name=workflow_name(kind), max_recovery_attempts=MAX_RECOVERIES)(job)


for _kind in OperationKind:
    _register_workflow(_kind)


def _outside_workflow(function: Callable[[], _T]) -> _T:
    """Call into DBOS without the running workflow's context, so that it records no step."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


logging.getLogger("dbos").addFilter(ExpectedEndings())
