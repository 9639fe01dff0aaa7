"""`cairn upgrade` and `cairn backup`: work on a control plane's databases, running or not."""

from pathlib import Path
from typing import Annotated, Final

import typer

from cairn.service.command.options import DataOption, administered
from cairn.service.command.output.documents import JsonOption, print_document

maintenance_app: Final = typer.Typer()


@maintenance_app.command()
def upgrade(data_dir: DataOption = None, json: JsonOption = False) -> None:
    """Migrate the databases to this version.

    The command uses the settings of the server (CAIRN_*). Servers and workers of the previous
    version continue meanwhile. A database that is up to date stays as it is.
    """
    from cairn.service.catalog.engine import upgrade_catalog  # takes seconds
    from cairn.service.jobs.dbos_engine.database import upgrade_jobs

    settings = administered(data_dir)
    settings.prepare()
    done = {
        "catalog": upgrade_catalog(settings.database_url),
        "jobs": upgrade_jobs(settings.jobs_database_url),
    }
    if json:
        revisions = {
            name: {"before": before, "after": after} for name, (before, after) in done.items()
        }
        print_document(revisions)
        return
    for name, (before, after) in done.items():
        if before == after:
            print(f"{name}: at revision {after} already")
        elif not before:
            print(f"{name}: made, at revision {after}")
        else:
            print(f"{name}: revision {before} -> {after}")


@maintenance_app.command()
def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new one, for the copies.")],
    data_dir: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Copy the databases, which have the audit trail and jobs.

    The store has neither. The command copies SQLite databases while they are in use; a server can
    start with the copies as its data folder. For PostgreSQL it prints the command to run.
    """
    from cairn.service.command.backup import back_up  # takes seconds

    settings = administered(data_dir)
    copies = back_up(settings, folder)
    if json:
        print_document({"copies": [str(copy) for copy in copies]})
        return
    for copy in copies:
        print(copy)
