"""Databases in SQLite that are made as one was: what migrations do of new ones is done once.

Only a database without tables is made so. What is proved of migrations, and programs that tests
start, run them.
"""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

from dbos import DBOS
from sqlalchemy import Connection, make_url

from cairn.service.catalog.engine import Catalog
from tests.service.seams import database, engine, migrate

TABLES = "SELECT count(*) FROM sqlite_master"
_migrate = DBOS.migrate


def _statements(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as made:
        begin, *statements, commit = made.iterdump()
    assert (begin, commit) == ("BEGIN TRANSACTION;", "COMMIT;")
    return statements


@contextmanager
def made_once(folder: Path) -> Iterator[None]:
    """Catalogs and databases of jobs that this process makes are as the first; an empty folder."""
    catalog, jobs = folder / "catalog.sqlite", folder / "jobs.sqlite"
    Catalog.open(f"sqlite:///{catalog}").close()
    database.upgrade_jobs(f"sqlite:///{jobs}")
    statements, job_statements = _statements(catalog), _statements(jobs)

    def upgraded(connection: Connection) -> None:
        if connection.dialect.name != "sqlite" or connection.exec_driver_sql(TABLES).scalar():
            return migrate.upgrade(connection)
        with closing(connection.connection.cursor()) as cursor:  # in the transaction that waits
            for statement in statements:
                cursor.execute(statement)

    def migrated(url: str) -> None:
        path = make_url(url).database if database.is_sqlite(url) else None
        if path is None or not Path(path).exists() or Path(path).stat().st_size > 0:
            return _migrate(url)
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as made:
            made.execute("BEGIN IMMEDIATE")
            if not made.execute(TABLES).fetchone()[0]:
                for statement in job_statements:
                    made.execute(statement)
            made.execute("COMMIT")

    with (
        patch.object(engine, "upgrade", upgraded),
        patch.object(DBOS, "migrate", staticmethod(migrated)),
    ):
        yield


@contextmanager
def made_anew() -> Iterator[None]:
    """Inside of `made_once`: migrations run, as they do without it."""
    with (
        patch.object(engine, "upgrade", migrate.upgrade),
        patch.object(DBOS, "migrate", staticmethod(_migrate)),
    ):
        yield


NEXT_MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = {before!r}
branch_labels = None
depends_on = None
{says}


def upgrade() -> None:
    op.create_table("more", sa.Column("id", sa.Integer(), primary_key=True))
    for name in ("runs", "checkpoints", "aliases", "roots", "audit_events", "workers"):
        op.add_column(name, sa.Column("more", sa.Text(), nullable=True))
"""


@contextmanager
def version_to_come(folder: Path, says: str = "", before_it: str = "") -> Iterator[None]:
    """A later version of Cairn, whose last migration adds to every table: revision 9999.

    Args:
        folder: Of its migrations; an empty one, or none.
        says: A line of that migration.
        before_it: A line of 9998, which comes before it then and does nothing.
    """
    shutil.copytree(migrate.MIGRATIONS, folder)
    before = max(path.name[:4] for path in (folder / "versions").glob("0*.py"))
    if before_it:
        text = NEXT_MIGRATION.format(before=before, says=before_it).replace("9999", "9998")
        text = text[: text.index("def upgrade")] + "def upgrade() -> None:\n    pass\n"
        (folder / "versions/9998_before.py").write_text(text)
        before = "9998"
    text = NEXT_MIGRATION.format(before=before, says=says)
    (folder / "versions/9999_more.py").write_text(text)
    with patch.object(migrate, "MIGRATIONS", folder):
        yield
