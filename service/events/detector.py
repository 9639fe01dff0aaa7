"""Detection of events that change no row of the catalog: ended jobs, and a stale index.

Jobs have a database of their own, which keeps the time of their end for good. Each end is published
exactly once, even if the server was down at that time.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from cairn.service.catalog import rows
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.events.outbox import NewEvent, last_job_end, publish
from cairn.service.jobs.dbos_engine.jobs import Jobs
from cairn.service.jobs.errors import OperationNotFoundError
from cairn.service.schemas import EventKind, Operation, OperationState
from cairn.storage.store.clock import rfc3339
from cairn.storage.store.uri import StoreURI

OVERLAP: Final = timedelta(minutes=10)
"""Largest expected difference between the clocks of workers."""

LOOKBACK: Final = timedelta(days=30)
"""Age of the oldest end of a job that is published if none was published before."""

BEHIND_SECONDS: Final = 900.0
"""Age of a root's last scan, in seconds, at which the index counts as stale.

It is more for roots whose scans are further apart.
"""

_LATE: Final = 2.0  # multiple of the interval between the last two scans


class EventDetector:
    """Detector of ended jobs and stale roots, whose methods are called again and again.

    Args:
        catalog: Catalog to publish events in.
        jobs: Jobs to watch.
        roots: Current store roots by name.
        scans: This server scans the store on a schedule.
    """

    def __init__(
        self, catalog: Catalog, jobs: Jobs, roots: Mapping[str, StoreURI], *, scans: bool
    ) -> None:
        self._catalog = catalog
        self._jobs = jobs
        self._roots = roots
        self._scans = scans
        self._told: set[tuple[datetime, str, OperationState]] = set()
        self._since: datetime | None = None
        self._scanned: dict[str, tuple[datetime, float]] = {}

    def jobs(self, now: datetime) -> None:
        """Publish the events of jobs that have ended since the last call."""
        if self._since is None:
            with self._catalog.query() as connection:
                self._since = last_job_end(connection) or now - LOOKBACK
        ended = self._jobs.ended(self._since - OVERLAP)
        # In order of time: after a crash, the next process starts from the last published end.
        for moment, operation, state in sorted(ended - self._told):
            try:
                job = self._jobs.get(operation)
            except OperationNotFoundError:  # DBOS's rows of the job were removed
                continue
            self._tell(_end_of(job, state, moment))
            self._since = max(self._since, moment)
        self._told = ended

    def index(self, now: datetime) -> None:
        """Publish one event for each root whose last scan is old or failed, but once per scan."""
        roots = dict(self._roots.items())
        with self._catalog.read() as session:
            root_rows = {root: rows.find_root(session, root) for root in roots}
        for root, uri in roots.items():
            row = root_rows[root]
            if row is None or row.uri != str(uri):
                continue
            is_late = False
            if self._scans and row.scanned is not None:
                last, apart = self._scanned.get(root, (row.scanned, 0.0))
                if row.scanned > last:
                    apart = (row.scanned - last).total_seconds()
                self._scanned[root] = row.scanned, apart
                # Of the time between the last two scans: a large bucket is scanned less often.
                latest = max(BEHIND_SECONDS, _LATE * apart)
                is_late = (now - row.scanned).total_seconds() > latest
            if row.problem is None and not is_late:
                continue
            looked = None if row.scanned is None else rfc3339(row.scanned)
            detail = {"looked": looked, "problem": row.problem}
            self._tell([NewEvent(EventKind.INDEX_BEHIND, root, "", (looked,), detail)])

    def _tell(self, events: list[NewEvent]) -> None:
        for event in events:
            with self._catalog.connect((event.root, event.run)) as connection:
                publish(connection, event)


def _end_of(operation: Operation, state: OperationState, ended: datetime) -> list[NewEvent]:
    request = operation.request
    root, run = str(request.get("root", "")), str(request.get("run", ""))
    error = operation.error
    detail = {
        "operation": operation.id,
        "kind": str(operation.kind),
        "state": state.value,
        "ended": rfc3339(ended),
        "step": request.get("step"),
        "error": None if error is None else {"type": error.type, "title": error.title},
    }
    key = (operation.id, rfc3339(ended), state.value)
    events = [NewEvent(EventKind.JOB_ENDED, root, run, key, detail, ended)]
    if operation.has_found_damage:
        more = {**detail, "problem": error.detail if error is not None else ""}
        events.insert(0, NewEvent(EventKind.VERIFY_FAILED, root, run, key, more, ended))
    return events
