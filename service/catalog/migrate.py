"""Brings a catalog database to the tables of this version, with the packaged Alembic scripts."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection

from cairn.service.errors import SettingsError
from cairn.service.observing import redact

MIGRATIONS = Path(__file__).parent / "migrations"


def configuration(connection: Connection) -> Config:
    """Alembic's configuration for an open connection."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def revisions(connection: Connection) -> tuple[str | None, str]:
    """The revision of a catalog, None of an empty one; and that of this version of Cairn."""
    scripts = ScriptDirectory.from_config(configuration(connection))
    return MigrationContext.configure(connection).get_current_revision(), str(
        scripts.get_current_head()
    )


def refuse_older(connection: Connection) -> None:
    """Raise if the tables are there and are of an older version.

    Raises:
        SettingsError: they are.
    """
    found, known = revisions(connection)
    scripts = ScriptDirectory.from_config(configuration(connection))
    older = {script.revision for script in scripts.walk_revisions()} - {known}
    if found in older:
        shown = redact(repr(connection.engine.url))
        raise SettingsError(
            f"CAIRN_DATABASE_URL: the catalog {shown} is at revision {found}, "
            f"and this version of Cairn needs {known}. Run `cairn upgrade` once (servers and "
            "workers of the version before go on meanwhile), or set CAIRN_AUTO_UPGRADE=true."
        )


def upgrade(connection: Connection) -> None:
    """Run the migrations that are missing, in the connection's transaction.

    Raises:
        SettingsError: The database was made by a newer version of Cairn.
    """
    config = configuration(connection)
    try:
        command.upgrade(config, "head")
    except CommandError as exc:
        known = ScriptDirectory.from_config(config).get_current_head()
        shown = redact(repr(connection.engine.url))
        raise SettingsError(
            f"CAIRN_DATABASE_URL: the catalog {shown} cannot be brought to "
            f"version {known}: {exc}. It was made by a newer Cairn: upgrade, or name another "
            "database and run `cairn index rebuild`."
        ) from exc
