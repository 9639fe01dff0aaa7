"""`cairn upgrade` and `cairn backup`: the databases of a control plane, served or not."""

from pathlib import Path
from typing import Annotated, Final

import typer

upkeep_app: Final = typer.Typer()

DataOption = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the databases are.")]


@upkeep_app.command()
def upgrade(data_dir: DataOption = None) -> None:
    """Bring the databases to this version.

    With the settings of the server (CAIRN_*). Servers and workers of the version before go on
    meanwhile. A database that is up to date stays as it is.
    """
    from cairn.service.catalog import upgrade_catalog  # takes seconds
    from cairn.service.jobs import upgrade_jobs
    from cairn.service.settings import load_settings

    settings = load_settings(**({} if data_dir is None else {"data_dir": data_dir}))
    settings.prepare()
    for name, (before, after) in (
        ("catalog", upgrade_catalog(settings.database_url)),
        ("jobs", upgrade_jobs(settings.jobs_database_url)),
    ):
        if before == after:
            print(f"{name}: at revision {after} already")
        elif not before:
            print(f"{name}: made, at revision {after}")
        else:
            print(f"{name}: revision {before} -> {after}")


@upkeep_app.command()
def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new one, for the copies.")],
    data_dir: DataOption = None,
) -> None:
    """Copy what the store does not hold: audit trail and jobs.

    Of SQLite databases, while they are used; the copies are a data folder that a server can be
    started with. Of PostgreSQL it says what to run.
    """
    from cairn.service.command.backup import back_up  # takes seconds
    from cairn.service.settings import load_settings

    settings = load_settings(**({} if data_dir is None else {"data_dir": data_dir}))
    for copy in back_up(settings, folder):
        print(copy)
