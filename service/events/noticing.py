"""Notices what no row of the catalog is written for: jobs that ended, and an index that is behind.

Jobs are kept in a database of their own, which has their ends for good: each is told from there
however late, and once. So nothing is lost between the two.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import select

from cairn.service.catalog import Catalog, EventRow, Happening, rows, tell
from cairn.service.jobs import Jobs, OperationNotFoundError
from cairn.service.schemas import EventKind, Operation, OperationState
from cairn.storage.store import StoreURI, from_rfc3339, rfc3339

OVERLAP: Final = timedelta(minutes=10)
"""Clocks of workers may differ by as much."""

LOOKED_BACK: Final = timedelta(days=30)
"""Where no end of a job was ever told."""

BEHIND_SECONDS: Final = 900.0
"""Since the last look at a root, where looks are made; more where they take long."""

_LATE: Final = 2.0  # times as long as it was from a look to the next, as far as that was seen


class Noticing:
    """Notices, again and again, what is new since the last time.

    Args:
        catalog: Where it is told.
        jobs: Whose ends.
        roots: Store roots by name, as they are at each moment.
        looks: Somebody looks at the store by himself.
    """

    def __init__(
        self, catalog: Catalog, jobs: Jobs, roots: Mapping[str, StoreURI], *, looks: bool
    ) -> None:
        self._catalog = catalog
        self._jobs = jobs
        self._roots = roots
        self._looks = looks
        self._told: set[tuple[datetime, str, OperationState]] = set()
        self._since: datetime | None = None
        self._scanned: dict[str, tuple[datetime, float]] = {}

    def jobs(self, now: datetime) -> None:
        """Tell of jobs that ended."""
        if self._since is None:
            self._since = self._last_end() or now - LOOKED_BACK
        ended = self._jobs.ended(self._since - OVERLAP)
        # The first first: who is ended in between goes on where the last that was told is.
        for moment, operation, state in sorted(ended - self._told):
            try:
                found = self._jobs.get(operation)
            except OperationNotFoundError:  # its rows were removed
                continue
            self._tell(_end_of(found, state, moment))
            self._since = max(self._since, moment)
        self._told = ended

    def index(self, now: datetime) -> None:
        """Tell of roots whose last look is long ago, or failed; once until there is another."""
        roots = dict(self._roots.items())
        with self._catalog.read() as session:
            known = {root: rows.find_root(session, root) for root in roots}
        for root, uri in roots.items():
            found = known[root]
            if found is None or found.uri != str(uri):
                continue
            scanned = found.scanned if self._looks else None
            late = scanned is not None and self._is_late(root, scanned, now)
            if found.problem is None and not late:
                continue
            looked = None if found.scanned is None else rfc3339(found.scanned)
            detail = {"looked": looked, "problem": found.problem}
            self._tell([Happening(EventKind.INDEX_BEHIND, root, "", (looked,), detail)])

    def _is_late(self, root: str, scanned: datetime, now: datetime) -> bool:
        """Whether the next look at a root is overdue: a large bucket is looked at now and then."""
        last, apart = self._scanned.get(root, (scanned, 0.0))
        if scanned > last:
            apart = (scanned - last).total_seconds()
        self._scanned[root] = scanned, apart
        return (now - scanned).total_seconds() > max(BEHIND_SECONDS, _LATE * apart)

    def _last_end(self) -> datetime | None:
        """Of the job whose end was told last."""
        query = select(EventRow.detail).where(EventRow.kind == EventKind.JOB_ENDED.value)
        with self._catalog.query() as connection:
            last = connection.execute(query.order_by(EventRow.id.desc()).limit(1)).first()
        return None if last is None else from_rfc3339(last.detail["ended"])

    def _tell(self, happenings: list[Happening]) -> None:
        for one in happenings:
            with self._catalog.connect((one.root, one.run)) as connection:
                tell(connection, one)


def _end_of(operation: Operation, state: OperationState, ended: datetime) -> list[Happening]:
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
    found = [Happening(EventKind.JOB_ENDED, root, run, key, detail, ended)]
    if operation.has_found_damage:
        more = {**detail, "problem": error.detail if error is not None else ""}
        found.insert(0, Happening(EventKind.VERIFY_FAILED, root, run, key, more, ended))
    return found
