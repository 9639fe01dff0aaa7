"""Migration of the catalog's tables to this version, by the packaged Alembic scripts."""

import functools
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, insert, select

from cairn.service.catalog.models import RevisionRow
from cairn.service.errors import SettingsError
from cairn.service.observability.redaction import redact

MIGRATIONS = Path(__file__).parent / "migrations"


def configuration(connection: Connection) -> Config:
    """Return Alembic's configuration for an open connection."""
    config = _located(MIGRATIONS)
    config.attributes["connection"] = connection
    return config


def _located(folder: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


@functools.cache
def _scripts(folder: Path) -> ScriptDirectory:
    """Load all scripts of a folder, once: Alembic compiles them at every load."""
    scripts = ScriptDirectory.from_config(_located(folder))
    scripts.get_current_head()
    return scripts


def revisions(connection: Connection) -> tuple[str | None, str]:
    """Return the revision of a catalog and that of this version; None: the catalog is empty."""
    head = str(_scripts(MIGRATIONS).get_current_head())
    return MigrationContext.configure(connection).get_current_revision(), head


def is_newer_and_works(connection: Connection) -> bool:
    """Return whether a newer version made the tables, and this version can still use them."""
    revision, _ = revisions(connection)
    supported = known_revisions()
    return (
        revision is not None
        and revision not in supported
        and works_with(connection, revision) in supported
    )


def works_with(connection: Connection, revision: str) -> str | None:
    """Return the oldest revision whose code can use tables of `revision`; None: unknown.

    The migration to `revision` has recorded it in the tables.
    """
    noted = select(RevisionRow.works_with).where(RevisionRow.revision == revision)
    return connection.scalar(noted)


def known_revisions() -> list[str]:
    """Return all revisions of this version, oldest first."""
    return [script.revision for script in _scripts(MIGRATIONS).walk_revisions()][::-1]


def _note_works_with(connection: Connection) -> None:
    """Record the oldest compatible revision, for older versions that start on these tables.

    Each migration script declares it as `works_with`; the newest of the declared revisions is
    recorded.
    """
    supported = known_revisions()
    said = (
        getattr(script.module, "works_with", script.revision)
        for script in _scripts(MIGRATIONS).walk_revisions()
    )
    oldest = max(said, key=supported.index)  # default: the migration's own revision
    if works_with(connection, supported[-1]) is None:
        connection.execute(insert(RevisionRow).values(revision=supported[-1], works_with=oldest))


def refuse_older(connection: Connection) -> None:
    """Raise if the tables exist and belong to an older version.

    Raises:
        SettingsError: The tables have to be migrated first.
    """
    revision, head = revisions(connection)
    if revision != head and revision in known_revisions():
        shown = redact(repr(connection.engine.url))
        raise SettingsError(
            f"CAIRN_DATABASE_URL: the catalog {shown} is at revision {revision}, "
            f"and this version of Cairn needs {head}. Run `cairn upgrade` once (servers and "
            "workers of the version before go on meanwhile), or set CAIRN_AUTO_UPGRADE=true."
        )


def upgrade(connection: Connection) -> None:
    """Run the missing migrations in the connection's transaction.

    Tables of a newer version stay as they are, if this version can use them.

    Raises:
        SettingsError: A newer version of Cairn made the database, and this one cannot use it.
    """
    if is_newer_and_works(connection):
        return
    revision, head = revisions(connection)
    try:
        if revision != head:  # checked here, since Alembic loads its environment even without work
            command.upgrade(configuration(connection), "head")
    except CommandError as exc:
        shown = redact(repr(connection.engine.url))
        raise SettingsError(
            f"CAIRN_DATABASE_URL: the catalog {shown} cannot be brought to "
            f"version {head}: {exc}. It was made by a newer Cairn: upgrade, or name another "
            "database and run `cairn index rebuild`."
        ) from exc
    _note_works_with(connection)
