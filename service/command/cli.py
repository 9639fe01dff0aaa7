"""The `cairn` command: the control plane's server, and its client for the shell.

What is asked for goes to standard output (tab-separated where that is no terminal), progress and
errors to standard error. Exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cairn.service.client.addresses import Address, find_step
from cairn.service.client.client import Client
from cairn.service.client.connection import DEFAULT_ROOT
from cairn.service.command import adoption as adoption_commands
from cairn.service.command import clean_up as clean_up_commands
from cairn.service.command import verify as verify_commands
from cairn.service.command.keys import keys_app
from cairn.service.command.listings import (
    list_checkpoints,
    list_operations,
    list_runs,
    name_problems,
)
from cairn.service.command.options import (
    CheckpointArgument,
    RootOption,
    RunArgument,
    UrlOption,
    WatchOption,
    console,
    errors,
)
from cairn.service.command.options import report as _report
from cairn.service.command.workers import workers_app
from cairn.service.errors import ProblemResponseError, ServiceError, WatchEndedError
from cairn.service.schemas import CheckpointState, OperationState
from cairn.storage.errors import StorageError
from cairn.storage.runs import check_run_name

if TYPE_CHECKING:
    from cairn.service.settings import Settings

HELP: Final = """Checkpoints of JAX training jobs: find, promote, fork, export, clean up.

`cairn serve` runs the control plane; the other commands ask it, at --url, else CAIRN_URL, else
port 8321 of this machine.

A CHECKPOINT is written RUN (its latest step), RUN@ALIAS or RUN/steps/N.
"""
FAILED, INTERRUPTED = 1, 130

app = typer.Typer(
    name="cairn",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
index = typer.Typer(help="The catalog, an index of the store.", no_args_is_help=True)
app.add_typer(index, name="index")
app.add_typer(clean_up_commands.app)  # beside the others, without a word of its own
app.add_typer(verify_commands.app)
app.add_typer(adoption_commands.app)

STATES: Final = (*(state.value for state in CheckpointState), "all")


def _known_state(state: str) -> str:
    if state not in STATES:
        raise typer.BadParameter(f"expected one of {', '.join(STATES)}, found {state!r}")
    return state


DtypeOption = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="Such as bfloat16; default: as stored.")
]
StoreOption = Annotated[
    str | None, typer.Option(metavar="URI", help="Folder or URI of the root `default`.")
]
DataOption = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the databases are.")]
OperationArgument = Annotated[str, typer.Argument(metavar="OPERATION", help="Its id: op-...")]


@app.command()
def serve(
    root: StoreOption = None,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Loopback address to listen on.")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="0: any free one.")] = None,
    data_dir: DataOption = None,
    worker: Annotated[
        bool | None,
        typer.Option("--worker/--no-worker", help="Execute jobs here too, or in `cairn worker`."),
    ] = None,
) -> None:
    """Run the control plane and its web page.

    Options override the CAIRN_* environment variables. SIGTERM or Ctrl-C ends it; jobs that are
    under way go on at the next start.
    """
    settings = _load_settings(root=root, host=host, port=port, data_dir=data_dir, worker=worker)
    from cairn.service.command.serving import serve_until_signalled  # takes seconds

    def announce(url: str) -> None:
        for name, uri in settings.root_uris.items():
            print(f"cairn: root {name} is {uri}")
        print(f"cairn: {url}", flush=True)

    serve_until_signalled(settings, announce)


@app.command("worker")
def work(
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of this worker; the same over restarts."),
    ] = None,
    root: StoreOption = None,
    data_dir: DataOption = None,
) -> None:
    """Execute jobs of a control plane, beside it.

    With the settings of the server (CAIRN_*), and a name that no other live worker has. SIGTERM or
    Ctrl-C ends it; jobs that are under way go on at its next start, or are taken over.
    """
    settings = _load_settings(root=root, data_dir=data_dir, executor_id=name)
    from cairn.service.command.working import work_until_signalled  # takes seconds

    work_until_signalled(
        settings, lambda: print(f"cairn: worker {settings.executor_id}", flush=True)
    )


app.add_typer(workers_app, name="workers")
app.add_typer(keys_app, name="keys")


@app.command()
def runs(
    root: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this root of the store.")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Look at the store first.")] = False,
    url: UrlOption = None,
) -> None:
    """List runs.

    The server looks at the store every few seconds: a run that nobody has announced is listed then.
    """
    with Client(url) as client:
        found = list(client.runs(root=root, refresh=refresh))
        list_runs(console, found)
    name_problems(errors, found)


@app.command()
def checkpoints(
    run: RunArgument,
    state: Annotated[
        str, typer.Option(metavar="STATE", help=", ".join(STATES) + ".", callback=_known_state)
    ] = CheckpointState.LISTED.value,
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """List the checkpoints of a run, highest step first."""
    check_run_name(run)
    with Client(url) as client:
        problems = [client.run(run, root=root, refresh=True)]
        list_checkpoints(console, client.checkpoints(run, root=root, state=state))
        name_problems(errors, problems)


@app.command()
def promote(
    run: RunArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="A listed step.")],
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="Such as production.")],
    create: Annotated[bool, typer.Option("--create", help="It must not exist yet.")] = False,
    expect: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Its sequence number as you last saw it."),
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Kept in its history.")] = "",
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Point an alias at a step.

    Refused if somebody else moves it at the same time. Without --create or --expect the alias is
    read first, and moved from where it was seen.
    """
    if create and expect is not None:
        raise typer.BadParameter("--create and --expect exclude each other")
    check_run_name(run)
    with Client(url) as client:
        if not create and expect is None:
            present = {found.alias: found for found in client.aliases(run, root=root, refresh=True)}
            expect = present[alias].sequence if alias in present else None
        moved = client.promote(run, step, alias, expect=expect, reason=reason, root=root)
    print(f"{run}@{moved.alias} is step {moved.step} (sequence {moved.sequence})")


@app.command()
def convert(
    checkpoint: CheckpointArgument,
    dtype: DtypeOption = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of one file, such as 500MB.")
    ] = "5GB",
    watch: WatchOption = False,
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Export a checkpoint for PyTorch (Hugging Face)."""
    with Client(url) as client:
        run, step = find_step(client, Address.parse(checkpoint), root)
        started = client.convert(run, step, root=root, dtype=dtype, max_shard_size=max_shard_size)
        _report(client, started, watch)


@app.command()
def gather(
    checkpoint: CheckpointArgument,
    dtype: DtypeOption = None,
    watch: WatchOption = False,
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Write a checkpoint's model into one safetensors file."""
    with Client(url) as client:
        run, step = find_step(client, Address.parse(checkpoint), root)
        _report(client, client.gather(run, step, root=root, dtype=dtype), watch)


@app.command()
def fork(
    checkpoint: CheckpointArgument,
    target: Annotated[str, typer.Argument(metavar="NAME", help="Of the new run.")],
    watch: WatchOption = False,
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Start a new run from a checkpoint."""
    check_run_name(target)
    with Client(url) as client:
        run, step = find_step(client, Address.parse(checkpoint), root)
        _report(client, client.restore(run, step, root=root, target=target), watch)


@app.command()
def path(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="RUN, RUN@ALIAS, RUN/steps/N; or URI or path."),
    ],
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Print the folder of a checkpoint, for plain Orbax.

    A store URI (gs://bucket/runs/my-run@production) or a path with ./ or / in front is looked up
    in the store itself, without a control plane.
    """
    if "://" in checkpoint or checkpoint.startswith((".", "/")):
        from cairn.storage.runs import resolve_checkpoint

        found, info = resolve_checkpoint(checkpoint)
        print(found.orbax_uri(info).orbax_path())
        return
    with Client(url) as client:
        run, step = find_step(client, Address.parse(checkpoint), root)
        print(client.checkpoint(run, step, root=root).uri.removeprefix("file://"))


@app.command()
def operations(
    state: Annotated[OperationState | None, typer.Option(help="Only these.")] = None,
    url: UrlOption = None,
) -> None:
    """List jobs, newest first."""
    with Client(url) as client:
        list_operations(console, client.operations(state=state))


@app.command()
def watch(operation: OperationArgument, url: UrlOption = None) -> None:
    """Follow a job to its end."""
    with Client(url) as client:
        _report(client, client.operation(operation), watch=True)


@app.command()
def cancel(operation: OperationArgument, url: UrlOption = None) -> None:
    """Stop a job, and remove what it wrote."""
    with Client(url) as client:
        stopped = client.cancel(operation)
    print(f"operation {stopped.id} {stopped.state.value}")


@index.command()
def rebuild(root: StoreOption = None, data_dir: DataOption = None) -> None:
    """Make it anew from the store.

    Needs no running control plane, and disturbs none.
    """
    from cairn.service.catalog import Catalog, Index

    settings = _load_settings(root=root, data_dir=data_dir)
    settings.prepare()
    catalog = Catalog.open(settings.database_url)
    try:
        found = Index(catalog).rebuild(settings.root_uris)
    finally:
        catalog.close()
    print(f"{found.runs} runs, {found.checkpoints} checkpoints, {found.aliases} aliases")


def _load_settings(**given: Any) -> "Settings":
    from cairn.service.settings import load_settings  # of the server; most commands ask it

    return load_settings(**{name: value for name, value in given.items() if value is not None})


def _text(error: Exception) -> str:
    if isinstance(error, ProblemResponseError):
        return str(error.problem.get("detail") or error)
    return str(error)


def main() -> None:
    """Run the command; an error that users can act on is one line, without a traceback."""
    try:
        app()
    except (ServiceError, StorageError) as error:
        errors.print(f"cairn: {_text(error)}", style="red", soft_wrap=True)
        sys.exit(INTERRUPTED if isinstance(error, WatchEndedError) else FAILED)
    except ModuleNotFoundError as error:  # commands load the parts that not everybody installs
        from cairn.installation import missing_extra

        explained = missing_extra(error, used=f"cairn {' '.join(sys.argv[1:2])}")
        if explained is None:
            raise
        errors.print(f"cairn: {explained}", style="red", soft_wrap=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
