"""How many jobs there are, and whether any waits: questions that DBOS has no cheap answer to.

The table `workflow_status` is one of the system tables that DBOS documents.
"""

from collections import Counter

from sqlalchemy import bindparam, column, create_engine, func, select, table

from cairn.service.jobs.dbos_engine.database import WalConnection, is_sqlite
from cairn.service.jobs.records import kind_of, state_of
from cairn.service.schemas import OperationState

CONNECT_SECONDS = 2
"""For metrics, which somebody waits for."""


class JobCounts:
    """The numbers of jobs in a database.

    Args:
        url: Of DBOS's database, whose tables have been made.
    """

    def __init__(self, url: str) -> None:
        sqlite = is_sqlite(url)
        options: dict[str, object] = (
            {"factory": WalConnection} if sqlite else {"connect_timeout": CONNECT_SECONDS}
        )
        # One statement a question, a few times a second: no transaction around it, and no question
        # before it. A connection that was cut fails once.
        self._engine = create_engine(
            url,
            connect_args=options,
            pool_size=1,
            isolation_level="AUTOCOMMIT",
            pool_reset_on_return=None,
            hide_parameters=True,
        )
        self._table = table(
            "workflow_status", column("name"), column("status"), schema=None if sqlite else "dbos"
        )
        # Made once, as it is asked all the time.
        self._waits = (
            select(1)
            .where(
                self._table.c.status == "ENQUEUED",
                self._table.c.name.in_(bindparam("names", expanding=True)),
            )
            .limit(1)
        )

    def read(self, names: list[str]) -> dict[tuple[str, OperationState], int]:
        """By kind and state; those that have none are not named.

        Args:
            names: Of the workflows that are jobs of ours.
        """
        name, status = self._table.c.name, self._table.c.status
        query = select(name, status, func.count()).where(name.in_(names)).group_by(name, status)
        counts: Counter[tuple[str, OperationState]] = Counter()
        with self._engine.connect() as connection:
            for of, was, count in connection.execute(query):
                counts[kind_of(of), state_of(was)] += count
        return dict(counts)

    def names(self) -> list[str]:
        """The names of all workflows that there are, of whatever release."""
        with self._engine.connect() as connection:
            return [*connection.execute(select(self._table.c.name).distinct()).scalars()]

    def any_waits(self, names: list[str]) -> bool:
        """Whether a job could be started.

        Args:
            names: Of the workflows that are jobs of ours.
        """
        with self._engine.connect() as connection:
            return connection.execute(self._waits, {"names": names}).first() is not None

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()
