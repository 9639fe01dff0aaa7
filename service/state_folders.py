"""Where the databases of a store are that nobody has said where to keep, one folder a store.

    <state>/cairn/                 of the first store that was served, as ever
    <state>/cairn/stores/<name>-<digest>/    of each other one

Whose a folder is, its catalog says, which names the root `default`. Nothing is moved.
"""

import hashlib
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from cairn.service.errors import SettingsError

CATALOG: Final = "catalog.sqlite"
JOBS: Final = "jobs.sqlite"
_STORES: Final = "stores"
_NAME_LETTERS: Final = 40


def folder_of_store(uri: str) -> Path:
    """Where the databases of a store are; it need not be there yet.

    Args:
        uri: Of its root `default`.
    """
    base = _base()
    if _owner(base) in (None, uri):
        return base
    name = re.sub(r"[^A-Za-z0-9._-]", "-", uri.rstrip("/").rpartition("/")[2])[:_NAME_LETTERS]
    return base / _STORES / f"{name}-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"


def folder_of_any(uri: str) -> tuple[Path, str | None]:
    """The same for who has not said which store is meant; and whose it is, if it is another's.

    Args:
        uri: Of the root that is served if nobody says which.

    Raises:
        SettingsError: There are several, and none of them is that root's.
    """
    own = folder_of_store(uri)
    known = [*_known()]
    if not known or own in known:
        return own, None
    if len(known) == 1:
        return known[0], _owner(known[0])
    listed = "; ".join(f"{folder} of {_owner(folder) or 'an unknown one'}" for folder in known)
    raise SettingsError(
        f"CAIRN_DATA_DIR: expected the databases of one store, found those of {len(known)}: "
        f"{listed}. Say which by CAIRN_ROOT=STORE, or by --data-dir FOLDER."
    )


def folders_beside(folder: Path) -> list[str]:
    """Where databases of other stores are, and of which, if a folder has none yet.

    Args:
        folder: As `folder_of_store` gives it.

    Raises:
        SettingsError: One of them can't be read.
    """
    known = [*_known()]
    if folder in known:
        return []
    return [f"{one} of {_owner(one) or 'an unknown one'}" for one in known]


def _known() -> Iterator[Path]:
    """Folders that have databases."""
    base = _base()
    with suppress(OSError):
        for folder in (base, *sorted((base / _STORES).glob("*"))):
            if any((folder / name).is_file() for name in (CATALOG, JOBS)):
                yield folder


def _owner(folder: Path) -> str | None:
    """The store that a folder's catalog is of; None: of none yet.

    Raises:
        SettingsError: The catalog can't be read.
    """
    file = folder / CATALOG
    if not file.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True, timeout=5)) as database:
            tables = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'roots'"
            if database.execute(tables).fetchone() is None:
                return None  # nobody has served with it
            row = database.execute("SELECT uri FROM roots WHERE name = 'default'").fetchone()
    except sqlite3.Error as exc:
        raise SettingsError(
            f"{file}: expected a catalog that says of which store it is, found: {exc}. Mend it, or "
            "say where the databases are: CAIRN_DATA_DIR, or --data-dir FOLDER."
        ) from exc
    return None if row is None else str(row[0])


def _base() -> Path:
    state_home = os.environ.get("XDG_STATE_HOME")
    try:
        base = Path(state_home) if state_home else Path.home() / ".local" / "state"
    except RuntimeError:  # a user without a home folder
        return Path(".cairn").absolute()
    nearest = next((parent for parent in (base, *base.parents) if parent.exists()), None)
    if nearest is None or not os.access(nearest, os.W_OK):
        return Path(".cairn").absolute()
    return (base / "cairn").absolute()
