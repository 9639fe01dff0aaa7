"""`cairn upgrade`: the databases of a control plane, which nobody need be serving."""

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
