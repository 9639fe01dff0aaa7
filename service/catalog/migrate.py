"""Brings a catalog database to the tables of this version, with the packaged Alembic scripts."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection

from cairn.service.errors import SettingsError

MIGRATIONS = Path(__file__).parent / "migrations"


def configuration(connection: Connection) -> Config:
    """Alembic's configuration for an open connection."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


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
        raise SettingsError(
            f"CAIRN_DATABASE_URL: the catalog {connection.engine.url!r} cannot be brought to "
            f"version {known}: {exc}. It was made by a newer Cairn: upgrade, or name another "
            "database and run `cairn index rebuild`."
        ) from exc
