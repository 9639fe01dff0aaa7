"""Default folders of databases, one for each store.

<state>/cairn/                 of the first store that was served
<state>/cairn/stores/<name>-<digest>/    of each other store

The catalog in a folder has the store that it belongs to: its root `default`. A folder never moves.
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
    """Return the default folder of a store's databases; it need not exist yet.

    Args:
        uri: URI of the store's root `default`.
    """
    base = _base()
    if _owner(base) in (None, uri):
        return base
    name = re.sub(r"[^A-Za-z0-9._-]", "-", uri.rstrip("/").rpartition("/")[2])[:_NAME_LETTERS]
    return base / _STORES / f"{name}-{hashlib.sha256(uri.encode()).hexdigest()[:12]}"


def folder_of_any(uri: str) -> tuple[Path, str | None]:
    """Return the databases' folder for a command whose caller has not named a store.

    This is the folder of the store at `uri`, if that store or no store has databases; else the
    folder of the only store that has.

    Args:
        uri: URI of the root that is served if the caller names none.

    Returns:
        The folder; and the URI of its store if that is another one than `uri`, else None.

    Raises:
        SettingsError: Several other stores have databases.
    """
    own = folder_of_store(uri)
    folders = [*_database_folders()]
    if not folders or own in folders:
        return own, None
    if len(folders) == 1:
        return folders[0], _owner(folders[0])
    listed = "; ".join(f"{folder} of {_owner(folder) or 'an unknown one'}" for folder in folders)
    raise SettingsError(
        f"CAIRN_DATA_DIR: expected the databases of one store, found those of {len(folders)}: "
        f"{listed}. Say which by CAIRN_ROOT=STORE, or by --data-dir FOLDER."
    )


def folders_beside(folder: Path) -> list[str]:
    """Describe the folders of other stores' databases; none if `folder` has databases itself.

    Args:
        folder: Folder from `folder_of_store`.

    Raises:
        SettingsError: The catalog of one of them is unreadable.
    """
    folders = [*_database_folders()]
    if folder in folders:
        return []
    return [f"{other} of {_owner(other) or 'an unknown one'}" for other in folders]


def _database_folders() -> Iterator[Path]:
    """Yield the folders that have databases."""
    base = _base()
    with suppress(OSError):
        for folder in (base, *sorted((base / _STORES).glob("*"))):
            if any((folder / name).is_file() for name in (CATALOG, JOBS)):
                yield folder


def _owner(folder: Path) -> str | None:
    """Return the store that a folder's catalog belongs to; None: it belongs to none yet.

    Raises:
        SettingsError: The catalog is unreadable.
    """
    file = folder / CATALOG
    if not file.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=rw", uri=True, timeout=5)) as database:
            tables = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'roots'"
            if database.execute(tables).fetchone() is None:
                return None  # no server has used this catalog yet
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
