"""Locks on workers' names: of all processes with a worker's name, only one is alive.

Two processes with one name would resume each other's jobs. The lock is on a file in the data folder
or, if jobs are in PostgreSQL, an advisory lock of a session there, for all machines. The operating
system or PostgreSQL releases it when the process dies.
"""

import fcntl
import hashlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from cairn.service.errors import SettingsError
from cairn.service.jobs.errors import JobsBusyError
from cairn.service.observability.redaction import redact
from cairn.service.private_files import make_private
from cairn.service.settings import Settings

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 5.0
"""Interval between two checks that a session still has its lock, in seconds."""

CONNECT_SECONDS: Final = 10
"""Time limit for connecting to a server that accepts and never answers, in seconds."""

ASKED_SECONDS: Final = 0.001
"""Pause in seconds, longer than another process's check of the lock takes."""


class WorkerName(ABC):
    """Name that only one live process has at a time.

    Attributes:
        name: The name.
    """

    name: str

    @abstractmethod
    def acquire(self, lost: Callable[[], None]) -> None:
        """Acquire the name.

        Args:
            lost: Called from another thread if another process has taken the name.

        Raises:
            JobsBusyError: Another process has the name.
            SettingsError: The file or database of the lock is unreachable.
        """

    @abstractmethod
    def release(self) -> None:
        """Release the name, if this process has it."""

    @abstractmethod
    def is_held(self) -> bool:
        """Return whether a live process has the name."""


def worker_name(settings: Settings, name: str | None = None) -> WorkerName:
    """Return a worker's name, whose lock is where these settings keep their jobs.

    Args:
        settings: Settings of the server.
        name: Name of the worker; default: that of the settings.
    """
    name = settings.executor_id if name is None else name
    return name_at(settings.jobs_database_url, settings.data_dir, name)


def name_at(url: str, folder: Path, name: str) -> WorkerName:
    """Return a name that only one of all processes that share a database has at a time.

    Args:
        url: URL of the database.
        folder: Folder of the lock file, if the database is a file.
        name: The name.
    """
    if make_url(url).get_backend_name() == "sqlite":
        return FileName(folder, name)
    return SessionName(url, name)


class FileName(WorkerName):
    """Name with a lock on a file.

    Args:
        folder: Data folder, which exists.
        name: The name.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        # A digest, since a name may have characters that a file name cannot have.
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._path = folder / f"executor-{digest}.lock"
        self._file: BinaryIO | None = None

    def acquire(self, lost: Callable[[], None]) -> None:
        """Acquire the name; see `WorkerName`."""
        file = self._open()
        try:
            while not _locked(file, fcntl.LOCK_EX):
                # `is_held` has a shared lock for a moment, a worker only an exclusive one. If a
                # shared lock is possible here, no worker has the name: try again.
                if not _locked(file, fcntl.LOCK_SH):
                    raise self._busy(file)
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(ASKED_SECONDS)
        except BaseException:
            file.close()
            raise
        # The process id is only for the error message of another process.
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        self._file = file

    def release(self) -> None:
        """Release the name; see `WorkerName`.

        The file stays: if it were removed, two processes could lock two files of this name.
        """
        if self._file is not None:
            self._file.close()
            self._file = None

    def is_held(self) -> bool:
        """Return whether a live process has the name; see `WorkerName`."""
        if not self._path.exists():
            return False
        with self._open() as file:
            return not _locked(file, fcntl.LOCK_SH)

    def _busy(self, file: BinaryIO) -> JobsBusyError:
        file.seek(0)
        holder = file.read(32).decode("ascii", "replace").strip() or "unknown"
        return JobsBusyError(
            f"{self._path.parent}: expected no running worker called {self.name!r} on this "
            f"data folder, found process {holder}. End it, or give this one another name "
            "(CAIRN_EXECUTOR_ID) or a data folder of its own (--data-dir)."
        )

    def _open(self) -> BinaryIO:
        try:
            make_private(str(self._path))  # other users could lock a readable file
            return self._path.open("a+b")
        except OSError as exc:
            raise SettingsError(
                f"CAIRN_DATA_DIR: {self._path} cannot be opened: {exc}. Point it at a folder that "
                "this user may write."
            ) from exc


def _locked(file: BinaryIO, how: int) -> bool:
    """Lock a file if that is possible at once; return whether it was."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SessionName(WorkerName):
    """Name with an advisory lock of a PostgreSQL session.

    If the session is cut, this acquires the name again, unless another process has it by then.

    Args:
        url: URL of the database.
        name: The name.
    """

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        # A connection of its own, not one of a pool: the lock lasts as long as the connection.
        waiting = {"connect_timeout": CONNECT_SECONDS, **make_url(url).query}
        self._engine = create_engine(
            url,
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
            connect_args={"connect_timeout": waiting["connect_timeout"]},
        )
        self._key = {"key": f"cairn worker {name}"}
        self._connection: Connection | None = None
        self._released = threading.Event()

    def acquire(self, lost: Callable[[], None]) -> None:
        """Acquire the name; see `WorkerName`."""
        shown = redact(repr(self._engine.url))
        try:
            self._connection = self._take()
        except SQLAlchemyError as exc:
            raise SettingsError(
                f"CAIRN_JOBS_DATABASE_URL: {shown} does not answer: {exc}."
            ) from exc
        if self._connection is None:
            raise JobsBusyError(
                f"{shown}: expected no live worker called {self.name!r}, found one. "
                "End it, or give this one another name (CAIRN_EXECUTOR_ID)."
            )
        self._released.clear()
        threading.Thread(target=self._keep, args=(lost,), name="cairn-name", daemon=True).start()

    def release(self) -> None:
        """Release the name; see `WorkerName`."""
        self._released.set()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.dispose()

    def is_held(self) -> bool:
        """Return whether a live process has the name; see `WorkerName`."""
        query = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND "
            "database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND "
            "objsubid = 1 AND "
            "((classid::bigint << 32) | objid::bigint) = hashtextextended(:key, 0)"
        )
        with self._engine.connect() as connection:
            return bool(connection.execute(text(query), self._key).scalar())

    def _take(self) -> Connection | None:
        connection = self._engine.connect()
        taken = False
        try:
            take = text("SELECT pg_try_advisory_lock(hashtextextended(:key, 0))")
            taken = bool(connection.execute(take, self._key).scalar())
        finally:
            if not taken:
                connection.close()
        return connection if taken else None

    def _keep(self, lost: Callable[[], None]) -> None:
        while not self._released.wait(POLL_SECONDS):
            try:
                if self._connection is not None:
                    self._connection.execute(text("SELECT 1"))
                    continue
                self._connection = self._take()
            except SQLAlchemyError as exc:
                logger.warning("worker %s: its session was cut: %s", self.name, exc)
                self._connection = None
                continue
            if self._connection is None:
                logger.error("worker %s: another process has taken its name", self.name)
                lost()
                return
