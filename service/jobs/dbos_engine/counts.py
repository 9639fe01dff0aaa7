"""Counts of jobs, and a check for waiting jobs. Both are expensive through DBOS's own interface.

They are read from the table `workflow_status`, one of the system tables that DBOS documents.
"""

from collections import Counter

from sqlalchemy import bindparam, column, func, select, table

from cairn.service.jobs.dbos_engine.database import autocommit_engine, is_sqlite
from cairn.service.jobs.records import kind_of, state_of
from cairn.service.schemas import OperationState

CONNECT_SECONDS = 2
"""Time limit for connecting, in seconds. It is short, since a metrics request waits meanwhile."""


class JobCounts:
    """Counter of the jobs in a database.

    Args:
        url: URL of DBOS's database; its tables exist.
    """

    def __init__(self, url: str) -> None:
        # Each call is one statement, a few times a second, so there is no transaction and no ping
        # before it. The price: the first call after the connection was cut fails.
        self._engine = autocommit_engine(
            url, connect_seconds=CONNECT_SECONDS, pool_reset_on_return=None
        )
        self._table = table(
            "workflow_status",
            column("name"),
            column("status"),
            schema=None if is_sqlite(url) else "dbos",
        )
        # Built once, since this query runs several times a second.
        self._waits = (
            select(1)
            .where(
                self._table.c.status == "ENQUEUED",
                self._table.c.name.in_(bindparam("names", expanding=True)),
            )
            .limit(1)
        )

    def read(self, names: list[str]) -> dict[tuple[str, OperationState], int]:
        """Count the jobs by kind and state; counts of 0 are left out.

        Args:
            names: Names of the workflows that are jobs.
        """
        name, status = self._table.c.name, self._table.c.status
        query = select(name, status, func.count()).where(name.in_(names)).group_by(name, status)
        counts: Counter[tuple[str, OperationState]] = Counter()
        with self._engine.connect() as connection:
            for of, was, count in connection.execute(query):
                counts[kind_of(of), state_of(was)] += count
        return dict(counts)

    def any_waits(self, names: list[str]) -> bool:
        """Return whether a job waits for a worker.

        Args:
            names: Names of the workflows that are jobs.
        """
        with self._engine.connect() as connection:
            return connection.execute(self._waits, {"names": names}).first() is not None

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()
