"""The catalog's database: one engine, short read and write transactions, migrated at opening."""

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

from cairn.service.catalog.migrate import refuse_older, revisions, upgrade
from cairn.service.errors import SettingsError
from cairn.service.observing import redact
from cairn.service.private_files import make_private

BUSY_TIMEOUT_SECONDS = 30
# A page of steps has hundreds of JSON columns: the standard library reads them at half the speed.
_OPTIONS: Final[dict[str, Any]] = {"hide_parameters": True, "json_deserializer": from_json}
READS_AT_ONCE: Final = 2
CONNECT_SECONDS = 10
"""Until a server that takes connections and says nothing counts as away; else nothing ends them."""


class Catalog:
    """An opened catalog.

    Reads see one snapshot; writes are serialized (SQLite: `BEGIN IMMEDIATE`, so that two writers
    queue up instead of failing half-way).

    Attributes:
        reads_at_once: How many readers get their answers soonest. An embedded database works in
            their own threads, of which one runs at a time; a server works for several.
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
        """Connect, and bring the tables to this version, unless a newer one has them and it works.

        Args:
            url: Of the database.
            auto_upgrade: Also in PostgreSQL where there are tables, which servers of an older
                version may be using: by `upgrade_catalog` else. SQLite is that of one server.

        Raises:
            SettingsError: The URL cannot be used, or its database was made by a newer version that
                this one cannot work with, or has to be upgraded first.
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
        """A session that reads one snapshot."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def query(self) -> Iterator[Connection]:
        """As `read`, for what is asked most: a connection, without a session's book-keeping.

        In PostgreSQL without a transaction, too: there each statement has a snapshot of its own
        anyway, and to begin and end one takes longer than a statement.
        """
        with self._reader.connect() as connection:
            yield connection

    @contextmanager
    def write(self, run: tuple[str, str] | None = None) -> Iterator[Session]:
        """A session whose changes commit together when the block ends, or not at all.

        Args:
            run: Root and name of the run whose rows it writes, or "" for the root's own: one
                session at a time does.
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
        """As `write`, for a few statements: a connection, without a session's book-keeping."""
        with self._written_alone(), self._writer.begin() as connection:
            if run is not None:
                lock(connection, "/".join(run))
            yield connection

    @contextmanager
    def _written_alone(self) -> Iterator[None]:
        """SQLite would have whoever finds another writing look again after a while, up to 0.1 s."""
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
    """Bring a catalog to this version, one process at a time; its revisions before and after.

    One of a newer version that this one works with stays as it is.

    Raises:
        SettingsError: The URL cannot be used, or its database was made by a newer version that
            this one cannot work with.
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
    """Wait for whoever else has a lock of this name, until the transaction ends.

    In SQLite a transaction that writes has locked out all others already.
    """
    if connection.dialect.name == "postgresql":
        key = func.hashtextextended(what, 0)
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions on its own
    cursor = connection.cursor()
    use_wal(cursor)
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def use_wal(cursor: Any) -> None:
    """Have a SQLite database keep a log beside it, so that readers and a writer do not wait.

    For this SQLite itself waits for nobody, such as another process that makes the tables.

    Args:
        cursor: Of the database.

    Raises:
        sqlite3.OperationalError: Others have it locked for too long, or it can't be had.
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
