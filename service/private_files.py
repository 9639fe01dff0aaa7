"""Files for their owner alone, whatever the umask and the mode of their folder.

Databases have secrets of webhooks and digests of keys in them; other files hold a key.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

MODE: Final = 0o600
OTHERS: Final = 0o077
"""Bits of a mode that let somebody else in."""
_BESIDE: Final = ("", "-wal", "-shm", "-journal")
"""Endings of the files of a SQLite database. SQLite gives new ones the mode of the first."""


def private_opener(path: str, flags: int) -> int:
    """Open a file, and create it with mode 600; for `open(opener=)`."""
    return os.open(path, flags, MODE)


def shared_files(database: str | None) -> dict[Path, int]:
    """The files of a SQLite database that others may read or write, with their modes.

    Args:
        database: Path of the database, or what SQLAlchemy has for one in memory.
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
    """Create a file with mode 600, or take an existing one from everybody else.

    Whoever opens it next says what is wrong with one that can't be made. One of another owner stays
    as it is: `cairn doctor` names it.

    Args:
        file: Path of a database, as for `shared_files`, or of another file.
    """
    if not file or file.startswith((":", "file:")):
        return
    with suppress(OSError), open(file, "xb", opener=private_opener):
        pass
    for path, mode in shared_files(file).items():
        with suppress(OSError):
            path.chmod(mode & ~OTHERS)
