"""Database of jobs: DBOS's own tables, in SQLite or PostgreSQL."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

from dbos import DBOS, DBOSClient, DBOSPortableJSONSerializer
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    MetaData,
    Table,
    create_engine,
    inspect,
    make_url,
    select,
)
from sqlalchemy.exc import DBAPIError

from cairn.service.catalog.engine import use_wal
from cairn.service.errors import SettingsError
from cairn.service.jobs.records import PART
from cairn.service.observability.redaction import redact
from cairn.service.private_files import make_private
from cairn.service.schemas import OperationKind

APPLICATION: Final = "cairn"
# DBOS resumes a stored job only under the same version. Raise it only if new code cannot continue
# old jobs, and let those finish first.
APPLICATION_VERSION: Final = "1"
PROGRESS_EVENT: Final = "progress"
CONNECT_SECONDS: Final = 10
QUEUE_POLL_SECONDS: Final = 10.0
"""Interval at which DBOS polls each queue, in seconds; `waker` wakes the queues sooner."""

LIMITS: Final[Mapping[str, int]] = {
    OperationKind.ADOPT: 1,
    OperationKind.CONVERT: 2,
    OperationKind.GATHER: 2,
    OperationKind.RESTORE: 2,
    OperationKind.VERIFY: 1,
    OperationKind.RETENTION: 1,
    OperationKind.GC: 1,
    PART: 2,
}
"""Largest number of jobs of each kind that one worker runs at a time.

Most are limited by the store, and a conversion may need 512 MiB.
"""


class WalConnection(sqlite3.Connection):
    """SQLite connection in WAL mode; `connect_args={"factory": ...}` passes it to SQLAlchemy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA busy_timeout=30000").close()
        with closing(self.cursor()) as cursor:
            use_wal(cursor)
        self.execute("PRAGMA synchronous=NORMAL").close()


def is_sqlite(url: str) -> bool:
    """Return whether a database is a SQLite file."""
    return make_url(url).get_backend_name() == "sqlite"


def autocommit_engine(url: str, *, connect_seconds: int, **options: Any) -> Engine:
    """Return an engine for reading DBOS's tables by single statements.

    Args:
        url: URL of DBOS's database.
        connect_seconds: Time limit for connecting to PostgreSQL.
        options: More options of `create_engine`.
    """
    connect: dict[str, Any] = {"connect_timeout": connect_seconds}
    if is_sqlite(url):
        connect = {"factory": WalConnection}
    return create_engine(
        url,
        connect_args=connect,
        pool_size=1,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,
        **options,
    )


def engine_options(url: str) -> dict[str, Any]:
    """Return engine options with which a worker survives an outage of DBOS's database.

    DBOS retries those PostgreSQL errors whose code, or driver's text, it recognizes. It does not
    recognize a missing socket or a name that does not resolve. So any failure to connect is raised
    as `ConnectionFailure`, which it retries.
    """
    if is_sqlite(url):
        return {"connect_args": {"factory": WalConnection}, "hide_parameters": True}
    parsed = make_url(url).set(drivername="postgresql+psycopg")
    dialect = create_engine(parsed).dialect
    positional, options = dialect.create_connect_args(parsed)
    options.setdefault("connect_timeout", CONNECT_SECONDS)
    driver: Any = dialect.loaded_dbapi

    def connect() -> Any:
        try:
            return driver.connect(*positional, **options)
        except driver.OperationalError as exc:
            raise driver.errors.ConnectionFailure(str(exc)) from exc

    return {"creator": connect, "hide_parameters": True}


def queue_of(kind: str) -> str:
    """Return the name of the queue for a kind of jobs."""
    return f"cairn-{kind}"


def upgrade_jobs(url: str) -> tuple[int, int]:
    """Migrate the tables to this version of DBOS; return their versions before (0: none) and after.

    Servers and workers of other versions continue meanwhile: DBOS's migrations are compatible.

    Raises:
        SettingsError: The database cannot be opened.
    """
    prepared = _prepared(url)
    try:
        before = _version(prepared)
        DBOS.migrate(prepared)
        return before, _version(prepared)
    except DBAPIError as exc:
        raise _unusable(url, exc) from exc


def _prepared(url: str) -> str:
    """Prepare a database, and return the URL to connect with.

    A SQLite file is made private; the URL of a server gets a connect timeout.
    """
    parsed = make_url(url)
    if is_sqlite(url):
        make_private(parsed.database)
        return url
    if "connect_timeout" in parsed.query:
        return url
    waiting = parsed.update_query_dict({"connect_timeout": str(CONNECT_SECONDS)})
    return waiting.render_as_string(hide_password=False)


def _version(url: str) -> int:
    engine = create_engine(url)
    schema = None if is_sqlite(url) else "dbos"
    table = Table("dbos_migrations", MetaData(), Column("version", BigInteger), schema=schema)
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table(table.name, schema=schema):
                return 0
            return connection.scalar(select(table.c.version)) or 0
    finally:
        engine.dispose()


def _unusable(url: str, exc: DBAPIError) -> SettingsError:
    shown = redact(repr(make_url(url)))
    return SettingsError(
        f"CAIRN_JOBS_DATABASE_URL: {shown} cannot be opened: {exc.orig}. Check that it "
        "runs, and that this user may write it."
    )


def open_database(url: str) -> DBOSClient:
    """Migrate the tables, register the queues, and return a client of the database.

    Raises:
        SettingsError: The database cannot be opened.
    """
    try:
        DBOS.migrate(_prepared(url))
        client = _connect(url)
        for kind, limit in LIMITS.items():
            client.register_queue(
                queue_of(kind), worker_concurrency=limit, polling_interval_sec=QUEUE_POLL_SECONDS
            )
    except DBAPIError as exc:
        raise _unusable(url, exc) from exc
    return client


def _connect(url: str) -> DBOSClient:
    options: dict[str, Any] = {
        "application_name": APPLICATION,
        "serializer": DBOSPortableJSONSerializer(),
        "retry_connection_errors": False,
        "lazy": True,
    }
    if is_sqlite(url):
        engine = create_engine(url, connect_args={"factory": WalConnection}, hide_parameters=True)
        return DBOSClient(system_database_engine=engine, **options)
    return DBOSClient(system_database_url=url, **options)
