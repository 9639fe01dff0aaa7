"""The `cairn` command: the control plane's server, and its client for the shell.

Commands that ask the control plane find it by `--url` or `CAIRN_URL`. A checkpoint is written
`run` (its latest step), `run@alias` or `run/steps/N`; `path` also takes a store URI of that form.
"""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from service.addresses import Address, find_step
from service.client import DEFAULT_ROOT, CairnClient
from service.errors import ServiceError
from service.settings import Settings
from service.sizes import size_text
from service.watch import watch_operation
from storage.errors import StorageError

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

app = typer.Typer(
    name="cairn", help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
index = typer.Typer(help="The catalog: an index over the store.", no_args_is_help=True)
app.add_typer(index, name="index")

UrlOption = Annotated[
    str | None, typer.Option("--url", help="Control plane; default: CAIRN_URL, else this machine.")
]
RootOption = Annotated[str, typer.Option("--root", help="Name of the store root.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Show progress until it has ended.")]
Checkpoint = Annotated[str, typer.Argument(help="run, run@alias or run/steps/N")]


@app.command()
def serve(
    root: Annotated[str | None, typer.Option(help="Folder or URI of the default root.")] = None,
    host: Annotated[str | None, typer.Option(help="Loopback address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: any free one.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the databases.")] = None,
) -> None:
    """Run the control plane and its dashboard; options override CAIRN_* variables."""
    import uvicorn

    from service.app import create_app

    settings = _settings(root=root, host=host, port=port, data_dir=data_dir)
    application = create_app(settings)
    console.print(f"cairn: {settings.root_uris} at http://{settings.host}:{settings.port}")
    uvicorn.run(
        application,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=5,
    )


@app.command()
def runs(url: UrlOption = None, root: Annotated[str | None, typer.Option()] = None) -> None:
    """List runs, of every root or of one."""
    table = Table("root", "run", "latest", "checkpoints", "size", "created", "forked from")
    with CairnClient(url) as client:
        for run in client.runs(root=root):
            table.add_row(
                run.root,
                run.name,
                "-" if run.latest_step is None else str(run.latest_step),
                str(run.checkpoint_count),
                size_text(run.bytes),
                f"{run.created:%Y-%m-%d %H:%M}",
                "" if run.lineage is None else f"{run.lineage.run}/steps/{run.lineage.step}",
            )
    console.print(table)


@app.command()
def checkpoints(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    state: Annotated[str, typer.Option(help="listed, in_flight, ..., or all")] = "listed",
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """List the checkpoints of a run, highest step first."""
    table = Table("step", "attempt", "state", "size", "leaves", "aliases", "created")
    with CairnClient(url) as client:
        for checkpoint in client.checkpoints(run, root=root, state=state):
            created = checkpoint.created
            table.add_row(
                str(checkpoint.step),
                str(checkpoint.attempt),
                checkpoint.state.value,
                "-" if checkpoint.bytes is None else size_text(checkpoint.bytes),
                "-" if checkpoint.leaves is None else str(checkpoint.leaves),
                ", ".join(checkpoint.aliases),
                "-" if created is None else f"{created:%Y-%m-%d %H:%M:%S}",
            )
    console.print(table)


@app.command()
def promote(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    step: Annotated[int, typer.Argument(min=0)],
    alias: Annotated[str, typer.Argument(help="For example: production.")],
    create: Annotated[bool, typer.Option("--create", help="It must not exist yet.")] = False,
    expect: Annotated[
        int | None, typer.Option(min=1, help="Its sequence number as you last saw it.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Kept in its history.")] = "",
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Point an alias at a step; refused if somebody moves it at the same time.

    Without --create or --expect the alias is read first, and moved from where it was seen.
    """
    if create and expect is not None:
        raise typer.BadParameter("--create and --expect exclude each other")
    with CairnClient(url) as client:
        if not create and expect is None:
            present = {found.alias: found for found in client.aliases(run, root=root)}
            expect = present[alias].sequence if alias in present else None
        moved = client.promote(run, step, alias, expect=expect, reason=reason, root=root)
    console.print(f"{run}@{moved.alias} is step {moved.step} (sequence {moved.sequence})")


@app.command()
def convert(
    checkpoint: Checkpoint,
    dtype: Annotated[str | None, typer.Option(help="Default: as stored.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="For example 5GB.")] = "5GB",
    watch: WatchOption = False,
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Export a checkpoint as a Hugging Face folder, which PyTorch loads."""
    with CairnClient(url) as client:
        run, step = find_step(client, Address.parse(checkpoint), root)
        operation = client.convert(run, step, root=root, dtype=dtype, max_shard_size=max_shard_size)
        watch_operation(client, operation, console, watch=watch)


@app.command()
def gather(
    checkpoint: Checkpoint,
    dtype: Annotated[str | None, typer.Option(help="Default: as stored.")] = None,
    watch: WatchOption = False,
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Consolidate the model of a checkpoint into one safetensors file."""
    with CairnClient(url) as client:
        run, step = find_step(client, Address.parse(checkpoint), root)
        watch_operation(
            client, client.gather(run, step, root=root, dtype=dtype), console, watch=watch
        )


@app.command()
def fork(
    checkpoint: Checkpoint,
    target: Annotated[str, typer.Argument(help="Name of the new run.")],
    watch: WatchOption = False,
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Start a new run from a checkpoint."""
    with CairnClient(url) as client:
        run, step = find_step(client, Address.parse(checkpoint), root)
        watch_operation(
            client, client.restore(run, step, root=root, target=target), console, watch=watch
        )


@app.command()
def path(checkpoint: Checkpoint, root: RootOption = DEFAULT_ROOT, url: UrlOption = None) -> None:
    """Print the folder of a checkpoint, which plain Orbax reads."""
    if "://" in checkpoint or checkpoint.startswith((".", "/")):
        from storage.run import resolve_checkpoint

        found, info = resolve_checkpoint(checkpoint)
        console.print(found.step_uri(info).orbax_path(), soft_wrap=True)
        return
    with CairnClient(url) as client:
        run, step = find_step(client, Address.parse(checkpoint), root)
        uri = client.checkpoint(run, step, root=root).uri
    console.print(uri.removeprefix("file://"), soft_wrap=True)


@index.command()
def rebuild(
    root: Annotated[str | None, typer.Option(help="Folder or URI of the default root.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the databases.")] = None,
) -> None:
    """Make the catalog anew from the store; needs no running control plane."""
    from service.catalog.engine import Catalog
    from service.catalog.refresh import Index

    settings = _settings(root=root, data_dir=data_dir)
    settings.prepare()
    catalog = Catalog.open(settings.database_url)
    try:
        found = Index(catalog).rebuild(settings.root_uris)
    finally:
        catalog.close()
    console.print(f"{found.runs} runs, {found.checkpoints} checkpoints, {found.aliases} aliases")


def _settings(**given: object) -> Settings:
    return Settings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]  # pydantic checks them


def _fail(error: Exception) -> NoReturn:
    errors.print(f"cairn: {error}", style="red", markup=False)
    sys.exit(1)


def main() -> None:
    """Run the command; an error that users can act on is one line, without a traceback."""
    try:
        app()
    except (ServiceError, StorageError) as error:
        _fail(error)


if __name__ == "__main__":
    main()
