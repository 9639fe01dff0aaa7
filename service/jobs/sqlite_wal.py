"""SQLite as a server wants it: readers don't wait for the writer, one fsync per checkpoint."""

import sqlite3
from typing import Any


class WalConnection(sqlite3.Connection):
    """A connection in WAL mode; hand it to SQLAlchemy as `connect_args={"factory": ...}`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA busy_timeout=30000").close()
        self.execute("PRAGMA journal_mode=WAL").close()
        self.execute("PRAGMA synchronous=NORMAL").close()
