"""Files that only their owner can read or write, whatever the umask and the folder's mode.

Databases have webhook secrets and digests of keys; other files have a key.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

MODE: Final = 0o600
OTHERS: Final = 0o077
"""Permission bits of other users."""
_BESIDE: Final = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files of a SQLite database.

SQLite creates the other files with the mode of the first one.
"""


def private_opener(path: str, flags: int) -> int:
    """Open a file, and create it with mode 600; for `open(opener=)`."""
    return os.open(path, flags, MODE)


def shared_files(database: str | None) -> dict[Path, int]:
    """Return the files of a SQLite database that other users may access, with their modes.

    Args:
        database: Path of the database; None, or SQLAlchemy's name of an in-memory one: no files.
    """
    shared = {}
    for ending in _BESIDE if database else ():
        path = Path(f"{database}{ending}")
        with suppress(OSError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode) and status.st_mode & OTHERS:
                shared[path] = stat.S_IMODE(status.st_mode)
    return shared


def make_private(file: str | None) -> None:
    """Create a file with mode 600, or remove other users' permissions from an existing one.

    No error is raised: a file that cannot be created is reported by the code that opens it next. A
    file of another owner stays as it is, and `cairn doctor` reports it.

    Args:
        file: Path of a database, see `shared_files`, or of another file.
    """
    if not file or file.startswith((":", "file:")):
        return
    with suppress(OSError), open(file, "xb", opener=private_opener):
        pass
    for path, mode in shared_files(file).items():
        with suppress(OSError):
            path.chmod(mode & ~OTHERS)
