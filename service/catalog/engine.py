"""Database of the catalog: one engine, short transactions, migrations at opening."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Final

from pydantic_core import from_json
from sqlalchemy import Engine, create_engine, event, func, make_url, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, TimeoutError
from sqlalchemy.orm import Session

from cairn.service.catalog.entries import SQLITE_NUMBER, written_number
from cairn.service.catalog.migrate import refuse_older, revisions, upgrade
from cairn.service.errors import SettingsError
from cairn.service.observability.redaction import redact
from cairn.service.private_files import make_private

BUSY_TIMEOUT_SECONDS = 30
# A page of steps has hundreds of JSON columns, and the standard library takes twice as long to
# parse them.
_OPTIONS: Final[dict[str, Any]] = {"hide_parameters": True, "json_deserializer": from_json}
READS_AT_ONCE: Final = 2
CONNECT_SECONDS = 10
"""Time limit for connecting. Without it, a server that accepts and never answers blocks forever."""


class Catalog:
    """Opened catalog.

    Reads see one snapshot. Writes are serialized; in SQLite by `BEGIN IMMEDIATE`, so that two
    writers queue up and neither fails in the middle.

    Attributes:
        reads_at_once: Number of concurrent reads with the lowest latency. An embedded database runs
            in the callers' threads, and the GIL lets one run at a time; a database server works for
            several.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = engine.execution_options(cairn_write=True)
        embedded = engine.dialect.name == "sqlite"
        self._writing = Lock() if embedded else None
        self._reader = (
            engine if embedded else engine.execution_options(isolation_level="AUTOCOMMIT")
        )
        self.reads_at_once = 1 if embedded else READS_AT_ONCE

    @classmethod
    def open(cls, url: str, *, auto_upgrade: bool = True) -> "Catalog":
        """Connect, and migrate the tables to this version.

        Tables of a newer version stay as they are, if this version works with them.

        Args:
            url: URL of the database.
            auto_upgrade: Migrate existing tables in PostgreSQL too, where servers of an older
                version may use them; if false, `upgrade_catalog` does. SQLite has one server only,
                and is always migrated.

        Raises:
            SettingsError: The URL is unusable; or a newer version made the database, and this one
                cannot work with it; or it has to be migrated first.
        """
        catalog = cls(_create_engine(url))
        try:
            with catalog._writer.begin() as connection:
                lock(connection, "cairn migrations")
                if not auto_upgrade and connection.dialect.name != "sqlite":
                    refuse_older(connection)
                upgrade(connection)
        except DBAPIError as exc:
            catalog.close()
            raise _unusable(catalog.engine, exc) from exc
        except BaseException:
            catalog.close()
            raise
        return catalog

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session that reads one snapshot."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def query(self) -> Iterator[Connection]:
        """Open a connection for frequent reads, without the bookkeeping of a session.

        In PostgreSQL it also has no transaction: each statement has a snapshot of its own anyway,
        and to begin and end a transaction takes longer than a statement.
        """
        with self._reader.connect() as connection:
            yield connection

    @contextmanager
    def write(self, run: tuple[str, str] | None = None) -> Iterator[Session]:
        """Open a session whose changes commit together at the end of the block, or not at all.

        Args:
            run: Root and name of the run whose rows it writes, or ("root", "") for the root itself.
                It serves as a lock, which one session has at a time; None: no lock.
        """
        with (
            self._written_alone(),
            Session(self._writer, expire_on_commit=False) as session,
            session.begin(),
        ):
            if run is not None:
                lock(session.connection(), "/".join(run))
            yield session

    @contextmanager
    def connect(self, run: tuple[str, str] | None = None) -> Iterator[Connection]:
        """Open a connection for a few writes: a `write` without the bookkeeping of a session.

        Args:
            run: See `write`.
        """
        with self._written_alone(), self._writer.begin() as connection:
            if run is not None:
                lock(connection, "/".join(run))
            yield connection

    @contextmanager
    def _written_alone(self) -> Iterator[None]:
        """Let one writer of this process use SQLite at a time; others would poll its lock.

        SQLite's own wait polls every 0.1 s.
        """
        if self._writing is None:
            yield
            return
        if not self._writing.acquire(timeout=BUSY_TIMEOUT_SECONDS):
            raise TimeoutError(f"others write for more than {BUSY_TIMEOUT_SECONDS} s")
        try:
            yield
        finally:
            self._writing.release()

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()


def upgrade_catalog(url: str) -> tuple[str | None, str]:
    """Migrate a catalog to this version, and return its revisions before and after.

    One process migrates at a time. A newer revision that this version works with stays as it is.

    Raises:
        SettingsError: The URL is unusable, or a newer version made the database, and this one
            cannot work with it.
    """
    engine = _create_engine(url)
    try:
        with engine.execution_options(cairn_write=True).begin() as connection:
            lock(connection, "cairn migrations")
            before, _ = revisions(connection)
            upgrade(connection)
            return before, str(revisions(connection)[0])
    except DBAPIError as exc:
        raise _unusable(engine, exc) from exc
    finally:
        engine.dispose()


def _unusable(engine: Engine, exc: DBAPIError) -> SettingsError:
    shown = redact(repr(engine.url))
    return SettingsError(
        f"CAIRN_DATABASE_URL: the catalog {shown} cannot be opened: {exc.orig}. Check that "
        "it runs, and that this user may write it."
    )


def _create_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError as exc:
        raise SettingsError(
            "CAIRN_DATABASE_URL: expected one such as sqlite:////srv/cairn/catalog.sqlite or "
            "postgresql+psycopg://user:password@host/database, found another text"
        ) from exc
    try:
        if parsed.get_backend_name() != "sqlite":
            waiting = {"connect_timeout": CONNECT_SECONDS, **parsed.query}
            connect: dict[str, Any] = {"connect_timeout": waiting["connect_timeout"]}
            return create_engine(parsed, pool_pre_ping=True, connect_args=connect, **_OPTIONS)
        if parsed.database:
            Path(parsed.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(parsed.database)
        connect = {"timeout": BUSY_TIMEOUT_SECONDS}
        engine = create_engine(parsed, connect_args=connect, **_OPTIONS)
    except (NoSuchModuleError, ImportError, OSError) as exc:
        shown = redact(repr(parsed))
        raise SettingsError(f"CAIRN_DATABASE_URL: {shown} cannot be used: {exc}") from exc
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def lock(connection: Connection, what: str) -> None:
    """Acquire the lock of a name until the end of the transaction.

    In SQLite there is nothing to do: a writing transaction excludes all others.
    """
    if connection.dialect.name == "postgresql":
        key = func.hashtextextended(what, 0)
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions itself
    connection.create_function(SQLITE_NUMBER, 1, written_number, deterministic=True)
    cursor = connection.cursor()
    use_wal(cursor)
    # With WAL this cannot corrupt the database; a power cut may lose the last commits.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def use_wal(cursor: Any) -> None:
    """Switch a SQLite database to WAL mode, in which readers and a writer do not block each other.

    SQLite's busy timeout does not apply to this statement, so it is retried here, while another
    process makes the tables for example.

    Args:
        cursor: Cursor of the database.

    Raises:
        sqlite3.OperationalError: The database stays locked for too long, or does not support WAL.
    """
    until = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("cairn_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
