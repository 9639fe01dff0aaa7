"""`cairn workers`: lists the job workers, and hands a dead worker's jobs to others."""

from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command import completion
from cairn.service.command.options import UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.schemas import TakenOver, WorkerList

workers_app: Final = typer.Typer(
    help="List the workers that execute jobs.", invoke_without_command=True
)

WorkerArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Of a dead worker.", autocompletion=completion.workers),
]


@workers_app.callback()
def workers(context: typer.Context, url: UrlOption = None, json: JsonOption = False) -> None:
    """List the workers that execute jobs."""
    if context.invoked_subcommand is not None:
        return
    with Client(url) as client:
        listed = client.workers()
    if json:
        print_document(WorkerList(workers=listed))
        return
    titles = ("worker", "alive", "host", "process", "version", "started (UTC)", "running")
    rows = (
        (
            worker.name,
            "yes" if worker.alive else "no",
            worker.host,
            worker.process,
            worker.version,
            worker.started,
            ", ".join(worker.running),
        )
        for worker in listed
    )
    print_table(console, titles, rows)


@workers_app.command("take-over")
def take_over(name: WorkerArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Hand the jobs of a dead worker to other workers."""
    with Client(url) as client:
        taken = client.take_over(name)
    if json:
        print_document(TakenOver(operations=taken))
        return
    for operation in taken:
        print(operation)
