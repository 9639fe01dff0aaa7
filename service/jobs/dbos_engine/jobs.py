"""Start, observation and control of jobs, in a process that need not execute any."""

import builtins
import hashlib
import json
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final

from dbos import DBOSClient, EnqueueOptions, WorkflowHandle, WorkflowStatus
from dbos import error as dbos_errors

from cairn.service.catalog.search_queries import Key
from cairn.service.errors import NotReadyError
from cairn.service.filters.search import EVERYTHING, Search
from cairn.service.jobs.context import JobKind, Request
from cairn.service.jobs.dbos_engine.counts import JobCounts
from cairn.service.jobs.dbos_engine.database import (
    APPLICATION_VERSION,
    PROGRESS_EVENT,
    open_database,
    queue_of,
)
from cairn.service.jobs.dbos_engine.errors import translated
from cairn.service.jobs.dbos_engine.search import JobSearch
from cairn.service.jobs.dbos_engine.worker import Worker, abandon
from cairn.service.jobs.errors import (
    IdempotencyKeyReusedError,
    OperationNotFoundError,
    OperationStateError,
    UnknownKindError,
)
from cairn.service.jobs.kinds import KINDS
from cairn.service.jobs.observation import origin
from cairn.service.jobs.records import (
    PART,
    failure_of,
    is_operation,
    kind_of,
    moment,
    operation_id,
    parts_of,
    state_of,
    statuses_of,
    whose,
    workflow_name,
)
from cairn.service.schemas import Operation, OperationState, Progress
from cairn.service.settings import Settings
from cairn.storage.store.uri import StoreURI

_NOT_STARTED: Final = frozenset({"DELAYED", "ENQUEUED"})


class Jobs:
    """Control of jobs through their database alone.

    Args:
        client: Client of the database.
        roots: Store roots by name.
        kinds: Kinds of jobs that can be started, by name.
        counts: Counter of the stored jobs; None: there are no metrics.
        search: Searches of the stored jobs; None: they are not listed here.

    Attributes:
        worker: Worker of this process, if it has one.
        stopping: True if the process is stopping, so that watchers have to end.
    """

    def __init__(
        self,
        client: DBOSClient,
        *,
        roots: Mapping[str, StoreURI],
        kinds: Mapping[str, JobKind],
        counts: JobCounts | None = None,
        search: JobSearch | None = None,
    ) -> None:
        self.roots = roots
        self.kinds = dict(kinds)
        self.worker: Worker | None = None
        self.stopping = False
        self._client = client
        self._counts = counts
        self._search = search

    def close(self) -> None:
        """Stop the worker, if there is one, and close every connection."""
        self.stopping = True
        if self.worker is not None:
            self.worker.close()
        self._client.destroy()
        for reader in (self._counts, self._search):
            if reader is not None:
                reader.close()

    @translated
    def start(
        self,
        kind: str,
        request: Request,
        *,
        caller: str = "",
        idempotency_key: str | None = None,
    ) -> Operation:
        """Start a job, or return the existing operation of an equal request.

        Without a key, the request is compared with the operations that have not ended.

        Args:
            kind: Key of `kinds`.
            request: JSON object for the job.
            caller: Name of the caller who starts it; empty: unknown.
            idempotency_key: A repeated key returns the same operation, for good. A new key starts a
                new operation.

        Raises:
            IdempotencyKeyReusedError: The key was used for another request.
        """
        options: EnqueueOptions = {
            "workflow_name": workflow_name(kind),
            "queue_name": queue_of(kind),
            "workflow_id": operation_id(idempotency_key),
            "app_version": APPLICATION_VERSION,
            "attributes": origin(),
            "authenticated_user": caller,
        }
        identity = json.dumps([kind, dict(request)], sort_keys=True)
        shared: EnqueueOptions = {
            **options,
            "deduplication_id": hashlib.sha256(identity.encode()).hexdigest(),
            "duplication_policy": "return-existing" if idempotency_key is None else "reject",
        }
        try:
            handle: WorkflowHandle[Any] = self._client.enqueue(shared, dict(request))
        except dbos_errors.DBOSQueueDeduplicatedError:
            # An operation of an equal request exists, but under an id that this key does not lead
            # to. So start a second operation, without deduplication.
            handle = self._client.enqueue(options, dict(request))
        except dbos_errors.DBOSConflictingWorkflowError as exc:
            raise self._reused(idempotency_key) from exc
        operation = self.get(handle.get_workflow_id())
        if operation.kind != kind or operation.request != dict(request):
            raise self._reused(idempotency_key)
        if self.worker is not None:
            self.worker.wake()
        return operation

    @translated
    def get(self, operation_id: str) -> Operation:
        """Return the current state of an operation.

        Raises:
            OperationNotFoundError: There is no such operation.
        """
        workflows = self._client.list_workflows(workflow_ids=[operation_id])
        if not workflows or not is_operation(workflows[0].name):
            raise OperationNotFoundError(operation_id)
        return self._describe(workflows[0], self._progress(workflows[0]))

    @translated
    def current(self, last_seen: Mapping[str, Operation]) -> dict[str, Operation]:
        """Return the current states of some operations, by id; deleted ones are left out.

        For operations that have not ended, only the columns that can change are read.

        Args:
            last_seen: States that the caller has, by id.
        """
        rows = self._client.list_workflows(
            workflow_ids=[*last_seen], load_input=False, load_output=False
        )
        ended = [row.workflow_id for row in rows if state_of(row.status).final]
        operations = {
            row.workflow_id: last_seen[row.workflow_id].model_copy(
                update={
                    "state": state_of(row.status),
                    "progress": Progress.model_validate(dict(self._progress(row))),
                    "updated": moment(row.updated_at),
                }
            )
            for row in rows
            if row.workflow_id not in ended
        }
        if ended:
            whole = self._client.list_workflows(workflow_ids=ended)
            operations.update(
                (row.workflow_id, self._describe(row, self._progress(row))) for row in whole
            )
        return operations

    @translated
    def list(
        self,
        search: Search = EVERYTHING,
        *,
        limit: int,
        after: Key = (),
        roots: Collection[str] | None = None,
    ) -> tuple[builtins.list[Operation], Key]:
        """Return the next operations of a search, and the sort key of the last one; (): no more.

        It takes three queries, however many operations there are.

        Args:
            search: Filter and order; newest first if it has no order.
            limit: Largest number of operations.
            after: Sort key of the last operation that the caller has; (): start with the first.
            roots: Only operations of these roots; None: all operations.

        Raises:
            NotReadyError: The jobs were opened without `search`.
        """
        if self._search is None:
            raise NotReadyError("These jobs were opened without their list.")
        page, last = self._search.page(search, roots=roots, after=after, limit=limit)
        if not page:  # for no ids, DBOS would list everything
            return [], ()
        progress = self._search.progress(page)
        rows = {row.workflow_id: row for row in self._client.list_workflows(workflow_ids=page)}
        return [
            self._describe(rows[name], progress.get(name, {})) for name in page if name in rows
        ], last

    @translated
    def cancel(self, operation_id: str) -> Operation:
        """Cancel an operation; a running job stops at its next block and removes what it wrote.

        An operation that was cancelled before is returned as it is.

        Raises:
            OperationNotFoundError: There is no such operation.
            OperationStateError: It has succeeded or failed.
            UnknownKindError: A newer server started it.
        """
        operation = self._known(operation_id)
        if not operation.state.final:
            # Cancel the job before its parts: a cancelled part would make a running job fail.
            self._client.cancel_workflow(operation_id)
            self._cancel_parts(operation_id)
            operation = self.get(operation_id)
        if operation.state is not OperationState.CANCELLED:
            raise OperationStateError(
                f"Operation {operation_id} has ended ({operation.state.value}), and can't be "
                "cancelled."
            )
        # Otherwise the job never started, its worker has died, or it runs in another process.
        if self.worker is None or not self.worker.interrupt(operation_id):
            abandon(self.kinds[operation.kind], self.roots, operation.request, operation_id)
        return operation

    @translated
    def resume(self, operation_id: str) -> Operation:
        """Run a failed or cancelled operation again from its start, under the same id.

        A verification that found damage cannot be resumed, since its result is final. Start a new
        verification to check a repair.

        Raises:
            OperationNotFoundError: There is no such operation.
            OperationStateError: It is under way, has succeeded, or has found damage.
            UnknownKindError: A newer server started it.
        """
        operation = self._known(operation_id)
        if operation.state not in (OperationState.FAILED, OperationState.CANCELLED):
            raise OperationStateError(
                f"Operation {operation_id} is {operation.state.value}. Only one that has failed or "
                "was cancelled can be resumed."
            )
        if operation.has_found_damage:
            raise OperationStateError(
                f"Operation {operation_id} is a verification that found damage: it ends "
                "the same when resumed. Repair the step, then verify again."
            )
        try:
            self._client.rewind_workflow(operation_id, queue_name=queue_of(operation.kind))
        except dbos_errors.DBOSException as exc:
            raise OperationStateError(
                f"Operation {operation_id} was resumed by another request just now."
            ) from exc
        return self.get(operation_id)

    @translated
    def ended(self, since: datetime) -> set[tuple[datetime, str, OperationState]]:
        """Return time, id and state of the operations that have ended since a moment.

        An operation that was resumed and runs again is left out. SQLite stores seconds only, so an
        operation that is resumed may end in two states within the same second.

        Args:
            since: The moment; a recent one, since all later ends are read.
        """
        final = [state for state in OperationState if state.final]
        workflows = self._client.list_workflows(
            name=self._names(),
            status=[status for state in final for status in statuses_of(state)],
            completed_after=since.isoformat(),
            load_input=False,
            load_output=False,
        )
        return {
            (moment(workflow.completed_at), workflow.workflow_id, state_of(workflow.status))
            for workflow in workflows
        }

    @translated
    def check(self) -> None:
        """Read from the database, and raise its error if it does not answer."""
        self._client.list_workflows(
            name=self._names(), limit=1, load_input=False, load_output=False
        )

    @translated
    def counts(self) -> dict[tuple[str, OperationState], int]:
        """Count the operations, by kind and state; empty: there are no metrics."""
        return {} if self._counts is None else self._counts.read(self._names())

    @translated
    def running(self) -> dict[str, builtins.list[str]]:
        """Return the ids of the operations that each worker runs, by the worker's name."""
        taken: dict[str, builtins.list[str]] = {}
        for status in self._client.list_workflows(
            name=self._taken(), status=["PENDING"], load_input=False, load_output=False
        ):
            operations = taken.setdefault(status.executor_id or "", [])
            if whose(status.workflow_id) not in operations:
                operations.append(whose(status.workflow_id))
        return taken

    @translated
    def put_back(self, worker: str) -> builtins.list[str]:
        """Put the operations of a dead worker back into their queues, and return their ids.

        Finished steps are not repeated. If the worker is alive nonetheless, it stops each operation
        at the operation's next step.
        """
        workflows = self._client.list_workflows(
            name=self._taken(),
            status=["PENDING"],
            executor_id=worker,
            load_input=False,
            load_output=False,
        )
        for status in workflows:
            queue = queue_of(kind_of(status.name))
            self._client.resume_workflow(status.workflow_id, queue_name=queue)
        return [*dict.fromkeys(whose(status.workflow_id) for status in workflows)]

    def _reused(self, key: str | None) -> IdempotencyKeyReusedError:
        return IdempotencyKeyReusedError(key, self.get(operation_id(key)))

    def _known(self, operation_id: str) -> Operation:
        operation = self.get(operation_id)
        if operation.kind not in self.kinds:
            raise UnknownKindError(
                f"Operation {operation_id} is a {str(operation.kind)!r}, which a newer server "
                f"started. This one knows {', '.join(sorted(self.kinds))}: use the newer one, or "
                "upgrade this one."
            )
        return operation

    def _names(self) -> builtins.list[str]:
        return [workflow_name(kind) for kind in self.kinds]

    def _taken(self) -> builtins.list[str]:
        """Return the names of all workflows that workers execute: jobs, and parts of jobs."""
        return [*self._names(), workflow_name(PART)]

    def _cancel_parts(self, operation_id: str) -> None:
        workflows = self._client.list_workflows(
            name=workflow_name(PART),
            workflow_id_prefix=parts_of(operation_id),
            status=["DELAYED", "ENQUEUED", "PENDING"],
            load_input=False,
            load_output=False,
        )
        self._client.cancel_workflows([status.workflow_id for status in workflows])

    def _describe(self, row: WorkflowStatus, progress: Mapping[str, Any]) -> Operation:
        """Return a job in the form of the API."""
        request = dict(row.input["args"][0] if row.input else {})
        state, error = state_of(row.status), None
        if state is OperationState.FAILED:
            data = getattr(row.error, "data", None)
            error = failure_of(row.status, data, f"/v1/operations/{row.workflow_id}")
        return Operation(
            id=row.workflow_id,
            kind=kind_of(row.name),
            state=state,
            progress=Progress.model_validate({} if _is_waiting(row) else dict(progress)),
            request=request,
            caller=row.authenticated_user or request.get("by"),
            result=row.output if state is OperationState.SUCCEEDED else None,
            error=error,
            created=moment(row.created_at),
            updated=moment(row.updated_at),
        )

    def _progress(self, status: WorkflowStatus) -> Mapping[str, Any]:
        if _is_waiting(status):
            return {}
        return self._client.get_event(status.workflow_id, PROGRESS_EVENT, timeout_seconds=0) or {}


def _is_waiting(row: WorkflowStatus) -> bool:
    """Return whether no worker has had the job since it was started or resumed."""
    return row.executor_id is None and row.status in _NOT_STARTED


def open_jobs(settings: Settings, roots: Mapping[str, StoreURI] | None = None) -> Jobs:
    """Open the jobs of a server, without a worker.

    Args:
        settings: Settings of the server.
        roots: Current roots by name; default: those of the settings.

    Raises:
        SettingsError: The database cannot be opened.
    """
    client = open_database(settings.jobs_database_url)
    counts = JobCounts(settings.jobs_database_url)
    uris = settings.root_uris if roots is None else roots
    search = JobSearch(settings.jobs_database_url)
    return Jobs(client, roots=uris, kinds=KINDS, counts=counts, search=search)
