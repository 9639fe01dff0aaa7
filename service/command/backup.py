"""Backups of the databases, taken while a server and its workers write to them."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from sqlalchemy import make_url

from cairn.service.errors import BackupError
from cairn.service.observability.redaction import redact
from cairn.service.private_files import make_private
from cairn.service.settings import Settings
from cairn.storage.store.disk.directory_entries import fsync_path

UNFINISHED: Final = ".unfinished"
_FOR_POSTGRESQL: Final = (
    'Use PostgreSQL\'s own tools: `pg_dump --format=custom --file=cairn.dump "$DATABASE"`; '
    "see docs/howto/back-up.md."
)


def back_up(settings: Settings, folder: Path) -> list[Path]:
    """Copy the SQLite databases into a folder that a server can use as its data folder.

    Each copy is a consistent snapshot, even while others write to the database, and passes SQLite's
    integrity check.

    Args:
        settings: Settings of the server.
        folder: Target folder; it is created if needed, and must have none of the databases.

    Returns:
        Paths of the copies.

    Raises:
        BackupError: A database is not in SQLite, is missing or cannot be copied, or the folder has
            it already. The text names all problems of the settings and the folder.
    """
    urls = {"catalog": settings.database_url, "jobs": settings.jobs_database_url}
    sources: dict[str, Path] = {}
    problems = []
    for name, url in urls.items():
        parsed = make_url(url)
        target = folder / f"{name}.sqlite"
        if parsed.get_backend_name() != "sqlite":
            shown = redact(repr(parsed))
            problems.append(f"{name}: expected SQLite, found {shown}. {_FOR_POSTGRESQL}")
            continue
        sources[name] = source = Path(parsed.database or "")
        if not source.is_file():
            problems.append(
                f"{name}: expected a database in {source}, found none. Name the server's data "
                "folder (--data-dir, CAIRN_DATA_DIR)."
            )
        if target.exists():
            problems.append(
                f"{name}: expected no file {target}, found one. Give a folder of its own to each "
                "backup."
            )
    if problems:
        raise BackupError("; ".join(problems))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        copies = [_copy(source, folder / f"{name}.sqlite") for name, source in sources.items()]
        fsync_path(str(folder))
        return copies
    except (sqlite3.Error, OSError) as exc:
        raise BackupError(
            f"{folder}: expected to copy {', '.join(map(str, sources.values()))} there, found: "
            f"{exc}. See that there is space, and that this user may write it."
        ) from exc


def _copy(source: Path, target: Path) -> Path:
    unfinished = target.with_name(f"{target.name}{UNFINISHED}")
    unfinished.unlink(missing_ok=True)
    try:
        make_private(str(unfinished))  # while it is empty, so that nobody else can read any of it
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=rw", uri=True)) as database,
            closing(sqlite3.connect(unfinished)) as copy,
        ):
            database.backup(copy)  # in one call: a snapshot, and no writer waits for it
            ((verdict,),) = copy.execute("PRAGMA integrity_check(1)").fetchall()
            if verdict != "ok":
                raise BackupError(
                    f"{source}: expected a sound database, found: {verdict}. The copy is not kept."
                )
            copy.execute("PRAGMA journal_mode=DELETE").close()  # one file, no -wal
        # Fsync before the rename: after a crash, the target is complete or absent.
        fsync_path(str(unfinished))
        return unfinished.rename(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
