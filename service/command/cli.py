"""The `cairn` command: the control plane's server, and its client for the shell.

Results go to standard output (tab-separated if it is not a terminal), progress and errors to
standard error. The exit status names the kind of a failure, see `failures.py`.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from cairn.counts import count_text
from cairn.installation import installed_version, missing_extra
from cairn.service.client.addresses import BEST
from cairn.service.client.client import Client
from cairn.service.command import adopt as adoption_commands
from cairn.service.command import aliases as alias_commands
from cairn.service.command import annotate as annotate_commands
from cairn.service.command import artifacts as artifact_commands
from cairn.service.command import audit as audit_commands
from cairn.service.command import clean_up as clean_up_commands
from cairn.service.command import completion
from cairn.service.command import create as create_commands
from cairn.service.command import download as download_commands
from cairn.service.command import import_weights as import_commands
from cairn.service.command import init as init_commands
from cairn.service.command import plan as plan_commands
from cairn.service.command import pull as pull_commands
from cairn.service.command import settings as settings_commands
from cairn.service.command import show as show_commands
from cairn.service.command import tensors as tensor_commands
from cairn.service.command import top as top_commands
from cairn.service.command import usage as usage_commands
from cairn.service.command import verify as verify_commands
from cairn.service.command import writer as writer_commands
from cairn.service.command.addresses import (
    StepPlace,
    check_run,
    is_in_store,
    resolve_run,
    resolve_step,
)
from cairn.service.command.doctor.command import app as doctor_app
from cairn.service.command.failures import (
    KNOWN,
    MEANINGS,
    ExitStatus,
    as_json,
    exit_status,
    line_of,
    output_problem,
    problem_of,
    usage_problem,
)
from cairn.service.command.keys import keys_app
from cairn.service.command.maintenance import maintenance_app
from cairn.service.command.options import (
    SIZE,
    TIME,
    AdoptFromOption,
    AllowNonfiniteOption,
    CheckLogitsOption,
    CheckpointArgument,
    DataOption,
    DespiteDamageOption,
    DtypeOption,
    FilterOption,
    FormatOption,
    LoraOption,
    OrderOption,
    ReferenceLogitsOption,
    RootOption,
    RunArgument,
    ShardSizeOption,
    StoreOption,
    TrainerConfigOption,
    UrlOption,
    WatchOption,
    console,
    errors,
    joined_filter,
    place_of_databases,
)
from cairn.service.command.options import report as _report
from cairn.service.command.output.documents import JsonOption, print_document, print_line
from cairn.service.command.output.listings import (
    list_checkpoints,
    list_operations,
    list_runs,
    name_limits,
    name_problems,
)
from cairn.service.command.policies import policies_app
from cairn.service.command.roots import roots_app
from cairn.service.command.trainer_config import read_trainer_config
from cairn.service.command.webhooks import webhooks_app
from cairn.service.command.workers import workers_app
from cairn.service.errors import ProblemResponseError, ServerUnreachableError
from cairn.service.glossary import state_label
from cairn.service.schemas import (
    AVAILABLE,
    Checkpoint,
    CheckpointList,
    CheckpointState,
    OperationKind,
    OperationList,
    OperationState,
    RunList,
)
from cairn.storage.runs.records.layout import RUN_FILE, check_run_name
from cairn.storage.store.uri import parse_uri

HELP: Final = """Checkpoints of JAX training jobs: find, promote, fork, export, clean up.

`cairn serve` runs the control plane; the other commands ask it, at --url, else CAIRN_URL, else
port 8321 of this machine.

A CHECKPOINT is written RUN (its latest step), RUN@ALIAS, RUN@best:METRIC[:min|max] or
RUN/steps/N. ROOT/ may stand before RUN; without it, the only root that has the run is meant. The
URI or path of a run's folder stands for ROOT/RUN; a path begins with ./ or /, such as
./runs/my-run.
"""
EPILOG: Final = "\n".join(
    (
        "\b",
        "Exit status:",
        *(f"  {status:<5}{text}" for status, text in MEANINGS.items()),
        "",
        "\b",
        "Words such as attempt, lease, item, leaf and record:",
        "  /help on the server's page, docs/reference/glossary.md in the documentation",
    )
)

app = typer.Typer(
    name="cairn",
    help=HELP,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
index = typer.Typer(help="Rebuild the catalog, the database that indexes the store.")
app.add_typer(index, name="index")
app.add_typer(init_commands.app)
app.add_typer(clean_up_commands.app)  # without a name: these are commands of `cairn` itself
app.add_typer(verify_commands.app)
app.add_typer(adoption_commands.app)
app.add_typer(import_commands.app)
app.add_typer(create_commands.app)
app.add_typer(annotate_commands.app)
app.add_typer(download_commands.app)
app.add_typer(pull_commands.app)
app.add_typer(artifact_commands.app)
app.add_typer(top_commands.app)
app.add_typer(alias_commands.app)
app.add_typer(writer_commands.app)
app.add_typer(show_commands.app)
app.add_typer(tensor_commands.app)
app.add_typer(usage_commands.app)
app.add_typer(plan_commands.app)
app.add_typer(audit_commands.app)
app.add_typer(settings_commands.app)
app.add_typer(maintenance_app)
app.add_typer(doctor_app)

STATES: Final = (*(state.value for state in CheckpointState), AVAILABLE, "all")


def _state_help(state: str) -> str:
    """Return a value of --state, and the label by which lists show it or the values it covers."""
    if state == AVAILABLE:
        return f"{state} (listed or damaged)"
    label = state_label(state)
    return state if label == state else f"{state} (shown as {label!r})"


def _known_state(state: str | None) -> str | None:
    if state is not None and state not in STATES:
        raise typer.BadParameter(f"expected one of {', '.join(STATES)}, found {state!r}")
    return state


def _step_number(text: str, run: str) -> int:
    if not (text.isascii() and text.isdigit()):
        other = f"{run}@best:METRIC" if text == BEST.rstrip(":") else f"{run}@{text}"
        raise typer.BadParameter(
            f"expected the number of a step, found {text!r}. For a step by another name write "
            f"{other}, and no STEP",
            param_hint="'STEP'",
        )
    return int(text)


def _alias_moved(
    place: StepPlace, alias: str, error: ProblemResponseError, *, create: bool, expect: int | None
) -> ProblemResponseError:
    """Return the refusal of a promotion whose alias is not as expected, with the next command."""
    name, current = f"{place.run}@{alias}", error.problem["current"]
    if current is None:
        detail = (
            f"{name}: expected sequence {expect}, found no such alias. Nothing was changed. To "
            "create it, repeat with `--create`."
        )
    elif create:
        detail = (
            f"{name} exists: it is step {current['step']} (sequence {current['sequence']}). Leave "
            "out --create to move it."
        )
    else:
        expected = "no such alias" if expect is None else f"sequence {expect}"
        detail = (
            f"{name}: expected {expected}, found sequence {current['sequence']}, step "
            f"{current['step']}, moved by {current['by']}. Nothing was changed. To move it all the "
            f"same, repeat with `--expect {current['sequence']}`."
        )
    return ProblemResponseError({**error.problem, "detail": detail}, error.status)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"cairn {installed_version()}")
        raise typer.Exit


@app.callback()
def cairn(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
    env_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="CAIRN_ENV_FILE",
            show_envvar=False,
            help="Variables that are not set, as `cairn init` writes them; default: "
            "CAIRN_ENV_FILE.",
        ),
    ] = None,
) -> None:
    """Handle the options that come before the name of a command; the help text is `HELP`."""
    if env_file is not None:
        from cairn.service.command.variables import read_env_file  # loads all settings

        read_env_file(env_file, os.environ)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(ExitStatus.USAGE)


OperationArgument = Annotated[
    str,
    typer.Argument(
        metavar="OPERATION", help="Its id: op-...", autocompletion=completion.operations
    ),
]


@app.command()
def serve(
    root: StoreOption = None,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Loopback address to listen on.")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="0: any free one.")] = None,
    data_dir: DataOption = None,
    adopt_from: AdoptFromOption = None,
    worker: Annotated[
        bool | None,
        typer.Option("--worker/--no-worker", help="Execute jobs here too, or in `cairn worker`."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run the control plane and its web page.

    Options override the CAIRN_* environment variables. SIGTERM or Ctrl-C ends it; interrupted jobs
    continue at the next start.
    """
    from cairn.service.command.server_process import serve_until_signalled  # takes seconds
    from cairn.service.settings import DEFAULT_ROOT, load_settings

    settings = load_settings(
        root=root,
        host=host,
        port=port,
        data_dir=data_dir,
        adopt_from={DEFAULT_ROOT: adopt_from} if adopt_from else None,
        worker=worker,
    )

    def announce(url: str) -> None:
        if json:
            roots = {name: str(uri) for name, uri in settings.root_uris.items()}
            print_line({"url": url, "roots": roots, "databases": place_of_databases(settings)})
            return
        for name, uri in settings.root_uris.items():
            print(f"cairn: root {name} is {uri}")
        print(f"cairn: databases are in {place_of_databases(settings)}")
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
    adopt_from: AdoptFromOption = None,
    json: JsonOption = False,
) -> None:
    """Run a background worker, which executes jobs of a server.

    It needs the settings of the server (CAIRN_*), and a name that no other live worker has. SIGTERM
    or Ctrl-C ends it; interrupted jobs continue at its next start, or another worker takes them
    over.
    """
    from cairn.service.command.worker_process import work_until_signalled  # takes seconds
    from cairn.service.settings import DEFAULT_ROOT, load_settings

    settings = load_settings(
        root=root,
        data_dir=data_dir,
        adopt_from={DEFAULT_ROOT: adopt_from} if adopt_from else None,
        executor_id=name,
    )

    def announce() -> None:
        if json:
            print_line({"worker": settings.executor_id})
        else:
            print(f"cairn: worker {settings.executor_id}", flush=True)

    work_until_signalled(settings, announce)


app.add_typer(workers_app, name="workers")
app.add_typer(roots_app, name="roots")
app.add_typer(keys_app, name="keys")
app.add_typer(webhooks_app, name="webhooks")
app.add_typer(policies_app, name="policies")


@app.command()
def runs(
    root: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only this root of the store.",
            autocompletion=completion.roots,
        ),
    ] = None,
    filter: FilterOption = "",
    order_by: OrderOption = "",
    columns: Annotated[
        str,
        typer.Option(
            "--columns",
            metavar="FIELDS",
            help="Such as: best.loss, labels.owner, config.hidden_size.",
        ),
    ] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="At most so many; 0: all.")] = 0,
    refresh: Annotated[bool, typer.Option("--refresh", help="Look at the store first.")] = False,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List runs.

    The server reads the store every few seconds, and finds runs that no job has announced.

    A FILTER joins conditions with AND, OR, NOT: labels.team = "nlp" AND latest_step > 1000. Fields:
    root, name, created, bytes, latest_step, checkpoint_count, labels.NAME, config.NAME,
    metrics.NAME (the last value), best.NAME, aliases:NAME.

    The best run of all, if a step of each run says which values are better (cairn annotate RUN
    --better loss=min): cairn runs --sort best.loss --columns best.loss --limit 1
    """
    with Client(url) as client:
        found = client.runs(
            root=root,
            filter=filter,
            order_by=order_by,
            columns=columns,
            page_size=min(limit, 100) or 100,
            refresh=refresh,
        )
        listed = list(islice(found, limit or None))
    if json:
        print_document(RunList(runs=listed))
        return
    list_runs(console, listed)
    name_problems(errors, listed)
    if filter or order_by or columns:
        name_limits(errors, listed)


@app.command()
def checkpoints(
    run: RunArgument,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE",
            help=", ".join(map(_state_help, STATES))
            + "; default: available, or all if FILTER asks about state.",
            callback=_known_state,
            autocompletion=lambda: list(STATES),
        ),
    ] = None,
    filter: FilterOption = "",
    order_by: OrderOption = "",
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the checkpoints of a run, highest step first.

    A FILTER joins conditions with AND, OR, NOT: labels.stage = "final" AND metrics.loss < 0.5.
    Fields: step, attempt, state, created, bytes, leaves, model_type, labels.NAME, metrics.NAME,
    better.NAME, aliases:NAME.

    The command reads a store URI, or a path with ./ or / in front, in the store itself; with a
    FILTER or an order, it asks the control plane.
    """
    check_run(run)
    page: Iterable[Checkpoint]
    with Client(url) as client:
        if is_in_store(run) and not filter and not order_by:
            from cairn.service.command.stored_runs import stored_checkpoints  # loads SQLAlchemy

            listed_run, page = stored_checkpoints(run, state or AVAILABLE)
        else:
            place = resolve_run(client, run, root)
            listed_run = client.run(place.run, root=place.root, refresh=True)
            page = client.checkpoints(
                place.run, root=place.root, state=state, filter=filter, order_by=order_by
            )
        if json:
            listed = CheckpointList(checkpoints=list(page)).model_dump(mode="json")
            print_document({**listed, "problems": listed_run.problems})
            return
        list_checkpoints(console, page)
        name_problems(errors, [listed_run])


@app.command()
def promote(
    checkpoint: CheckpointArgument,
    step_or_alias: Annotated[
        str | None,
        typer.Argument(
            metavar="STEP",
            help="A listed step, after a RUN alone; left out after another CHECKPOINT.",
            show_default=False,
            autocompletion=completion.steps_and_aliases,
        ),
    ] = None,
    last: Annotated[
        str | None,
        typer.Argument(
            metavar="ALIAS",
            help="Needed always. Such as production.",
            show_default=False,
            autocompletion=completion.aliases,
        ),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="It must not exist yet.")] = False,
    expect: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Its sequence in `cairn aliases`, as you last saw it."
        ),
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Kept in its history.")] = "",
    attempt: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Refuse the step if another attempt saved it."),
    ] = None,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Point an alias at a step.

    Written `cairn promote RUN STEP ALIAS`, or `cairn promote CHECKPOINT ALIAS` for the step that an
    address names, such as my-run@best:eval/loss:min.

    The command is refused if somebody else moves the alias at the same time. Without --create or
    --expect, it reads the alias first, and moves it only if it has not changed since.
    """
    if create and expect is not None:
        raise typer.BadParameter("--create and --expect exclude each other")
    if step_or_alias is None:
        raise typer.BadParameter("expected an ALIAS, such as production", param_hint="'ALIAS'")
    alias = step_or_alias if last is None else last
    step = None if last is None else _step_number(step_or_alias, checkpoint)
    if step is not None:
        check_run(checkpoint)
    elif alias.isdigit():
        raise typer.BadParameter(f"expected an ALIAS after the step {alias}")
    with Client(url) as client:
        if step is None:
            place = resolve_step(client, checkpoint, root)
        else:
            run = resolve_run(client, checkpoint, root)
            place = StepPlace(run.root, run.run, step)
        if not create and expect is None:
            present = {
                alias_now.alias: alias_now
                for alias_now in client.aliases(place.run, root=place.root, refresh=True)
            }
            expect = present[alias].sequence if alias in present else None
        try:
            moved = client.promote(
                place.run,
                place.step,
                alias,
                expect=expect,
                reason=reason,
                attempt=attempt,
                root=place.root,
            )
        except ProblemResponseError as error:
            if "current" not in error.problem:
                raise
            raise _alias_moved(place, alias, error, create=create, expect=expect) from error
    if json:
        print_document(moved)
        return
    print(f"{place.run}@{moved.alias} is step {moved.step} (sequence {moved.sequence})")


@app.command()
def convert(
    checkpoint: CheckpointArgument,
    dtype: DtypeOption = None,
    max_shard_size: ShardSizeOption = "5GB",
    memory: Annotated[
        str | None, typer.Option(help="Most that writing takes, such as 2GiB.", **SIZE)
    ] = None,
    format: FormatOption = "huggingface",
    lora: LoraOption = None,
    allow_nonfinite: AllowNonfiniteOption = False,
    check_logits: CheckLogitsOption = False,
    reference_logits: ReferenceLogitsOption = None,
    config: TrainerConfigOption = None,
    despite_damage: DespiteDamageOption = None,
    watch: WatchOption = False,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Export a checkpoint for PyTorch (Hugging Face)."""
    later: dict[str, Any] = {"memory": memory} if memory else {}
    if lora:
        later["lora"] = lora
    if format != "huggingface":
        later["format"] = format
    if allow_nonfinite:
        later["allow_nonfinite"] = True
    if check_logits:
        later["check_logits"] = True
    if reference_logits is not None:
        later["reference_logits"] = str(parse_uri(reference_logits))
    if config is not None:
        later["config"] = read_trainer_config(config)
    if despite_damage is not None:
        later["despite_damage"] = despite_damage
    with Client(url) as client:
        place = resolve_step(client, checkpoint, root)
        started = client.convert(
            place.run,
            place.step,
            root=place.root,
            dtype=dtype,
            max_shard_size=max_shard_size,
            **later,
        )
        _report(client, started, watch, json)


@app.command()
def gather(
    checkpoint: CheckpointArgument,
    dtype: DtypeOption = None,
    items: Annotated[
        list[str] | None,
        typer.Option(
            "--item",
            metavar="NAME",
            help="Write this one; may be repeated. Default: model, or else all that hold arrays.",
        ),
    ] = None,
    despite_damage: DespiteDamageOption = None,
    watch: WatchOption = False,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Write a checkpoint's model into one safetensors file."""
    later: dict[str, Any] = {} if despite_damage is None else {"despite_damage": despite_damage}
    if items:
        later["items"] = items
    with Client(url) as client:
        place = resolve_step(client, checkpoint, root)
        started = client.gather(place.run, place.step, root=place.root, dtype=dtype, **later)
        _report(client, started, watch, json)


@app.command()
def fork(
    checkpoint: CheckpointArgument,
    target: Annotated[str, typer.Argument(metavar="NAME", help="Of the new run.")],
    despite_damage: DespiteDamageOption = None,
    watch: WatchOption = False,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Start a new run from a checkpoint."""
    check_run_name(target)
    with Client(url) as client:
        place = resolve_step(client, checkpoint, root)
        started = client.restore(
            place.run, place.step, root=place.root, target=target, despite_damage=despite_damage
        )
        _report(client, started, watch, json)


@app.command()
def rollback(
    checkpoint: CheckpointArgument,
    strand: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ALIAS",
            help="May go on naming a step that is superseded; may be repeated.",
            autocompletion=completion.aliases,
        ),
    ] = None,
    despite_damage: DespiteDamageOption = None,
    watch: WatchOption = False,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Go back to a checkpoint; later ones are superseded.

    This is about the run, which goes on from the checkpoint. To undo a promotion:
    cairn promote RUN STEP ALIAS

    Superseded steps are not deleted, and `cairn checkpoints RUN --state all` lists them, but no
    command makes them the run's latest again. On a terminal the command asks first.
    """
    with Client(url) as client:
        place = resolve_step(client, checkpoint, root)
        if sys.stdin.isatty() and not json:
            _confirm_rollback(client, place)
        started = client.roll_back(
            place.run,
            place.step,
            strand=strand or (),
            despite_damage=despite_damage,
            root=place.root,
        )
        _report(client, started, watch, json)


def _confirm_rollback(client: Client, place: StepPlace) -> None:
    """Ask on the terminal whether later steps may be superseded; exit if not."""
    listed = client.checkpoints(place.run, root=place.root, filter=f"step > {place.step}")
    later = [checkpoint.step for checkpoint in listed]
    if not later:
        return
    steps = (
        f"step {later[0]}" if len(later) == 1 else f"{len(later)} steps, {later[-1]} to {later[0]},"
    )
    text = (
        f"Run {place.run} goes back to step {place.step}: {steps} would be superseded, for good. "
        f"To undo a promotion instead: cairn promote {place.run} {place.step} ALIAS"
    )
    errors.print(text, soft_wrap=True, markup=False)
    try:
        is_confirmed = typer.confirm("Roll back the run?", err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if not is_confirmed:
        errors.print("Nothing was changed.")
        raise typer.Exit(ExitStatus.FAILED)


@app.command()
def path(
    checkpoint: CheckpointArgument,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Print the folder of a checkpoint; plain Orbax can load it.

    For a store URI (gs://bucket/runs/my-run@production), or a path with ./ or / in front, the
    command reads the store itself, without a control plane.
    """
    if is_in_store(checkpoint):
        from cairn.storage.runs.damage import known_damage
        from cairn.storage.runs.resolution import resolve_checkpoint

        opened, info = resolve_checkpoint(checkpoint, damaged=None)
        folder = opened.orbax_uri(info).orbax_path()
        is_damaged = known_damage(opened, (info.step, info.attempt)) is not None
    else:
        with Client(url) as client:
            place = resolve_step(client, checkpoint, root)
            noted = client.checkpoint(place.run, place.step, root=place.root)
        folder, is_damaged = noted.uri.removeprefix("file://"), noted.damaged is not None
    if is_damaged:
        text = f"{checkpoint} is damaged: plain Orbax may load other values than were saved"
        errors.print(text, soft_wrap=True, markup=False)
    if json:
        print_document({"path": folder})
    else:
        print(folder)


@app.command()
def operations(
    state: Annotated[OperationState | None, typer.Option(help="Only these.")] = None,
    kind: Annotated[OperationKind | None, typer.Option(help="Only these.")] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Of this run.", autocompletion=completion.runs),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of this root.", autocompletion=completion.roots),
    ] = None,
    caller: Annotated[str | None, typer.Option(metavar="NAME", help="Started by this one.")] = None,
    since: Annotated[
        float | None, typer.Option(help="Within this time before now, such as 7d.", **TIME)
    ] = None,
    filter: FilterOption = "",
    order_by: OrderOption = "",
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="At most so many; 0: all.")] = 0,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List jobs, newest first.

    A FILTER joins conditions with AND, OR, NOT: state = failed AND NOT kind = verify. Fields: kind,
    state, root, run, step, caller, format, dtype, created, updated.
    """
    values = {"kind": kind and kind.value, "root": root, "run": run, "caller": caller}
    whole = joined_filter(filter, values, moment="created", since=since)
    with Client(url) as client:
        size = min(limit, 100) or 100
        every = client.operations(state=state, filter=whole, order_by=order_by, page_size=size)
        listed = islice(every, limit or None)
        if json:
            print_document(OperationList(operations=list(listed)))
            return
        list_operations(console, listed)


@app.command()
def watch(operation: OperationArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Show the progress of a job until it ends."""
    with Client(url) as client:
        _report(client, client.operation(operation), watch=True, json=json)


@app.command()
def cancel(operation: OperationArgument, url: UrlOption = None, json: JsonOption = False) -> None:
    """Stop a job, and remove what it wrote."""
    with Client(url) as client:
        stopped = client.cancel(operation)
    if json:
        print_document(stopped)
    else:
        print(f"operation {stopped.id} {stopped.state.value}")


@index.command()
def rebuild(
    root: StoreOption = None, data_dir: DataOption = None, json: JsonOption = False
) -> None:
    """Rebuild the index of the catalog from the store.

    The command needs no running control plane, and does not disturb one.
    """
    from cairn.service.catalog.engine import Catalog
    from cairn.service.catalog.refresh import Index
    from cairn.service.catalog.roots import Roots
    from cairn.service.settings import load_settings

    settings = load_settings(root=root, data_dir=data_dir)
    settings.prepare()
    catalog = Catalog.open(settings.database_url, auto_upgrade=settings.auto_upgrade)
    try:
        counts = Index(catalog).rebuild(Roots(catalog, settings.root_uris))
    finally:
        catalog.close()
    if json:
        print_document(
            {"runs": counts.runs, "checkpoints": counts.checkpoints, "aliases": counts.aliases}
        )
        return
    parts = (
        count_text(counts.runs, "run"),
        count_text(counts.checkpoints, "checkpoint"),
        count_text(counts.aliases, "alias"),
    )
    print(", ".join(parts))


def main() -> None:
    """Run the command.

    Errors that users can act on are printed as one line or, with --json, as a problem.
    """
    sys.exit(_run(sys.argv[1:]))


_NOT_THERE: Final = ("urn:cairn:problem:root-not-found", "urn:cairn:problem:run-not-found")
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

_OTHER_NAMES: Final = {"exports": "artifacts"}
"""Names that people try for a command, and that resemble none."""

# Base class of all errors that Typer raises for wrong usage. It comes from the MRO, since Typer
# may keep it under any name.
_UsageError: Final = cast(type[Exception], typer.BadParameter.__mro__[1])


def _run(arguments: Sequence[str]) -> int:
    if prefix := completion.rejoin_words(os.environ):
        return _complete_after(prefix)
    try:
        status = app(arguments, prog_name="cairn", standalone_mode=False)
        if sys.stdout is not None:  # None if the shell has closed it
            sys.stdout.flush()
        return int(status or ExitStatus.DONE)
    except _UsageError as error:
        return _refuse(error, arguments)
    except KNOWN as error:
        _tell(problem_of(error), line_of(error) + _path_advice(error, arguments), arguments)
        return exit_status(error)
    except ModuleNotFoundError as error:  # a command may import a package of an extra
        explained = missing_extra(error, used=f"cairn {' '.join(arguments[:1])}")
        if explained is None:
            raise
        _tell(problem_of(explained), str(explained), arguments)
        return exit_status(explained)
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        return _end_quietly()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _drop_output()
        text = f"standard output: expected it written, found: {os.strerror(error.errno or 0)}"
        _tell(output_problem(text), text, arguments)
        return ExitStatus.FAILED
    except SystemExit as ending:  # Typer's answer to a broken pipe
        if isinstance(ending.__context__, BrokenPipeError):
            return _end_quietly()
        raise


def _complete_after(prefix: str) -> int:
    """Print completions without the prefix that the shell has already; return the exit status."""
    answers = io.StringIO()
    with contextlib.redirect_stdout(answers), contextlib.suppress(SystemExit):
        app((), prog_name="cairn")
    print("\n".join(line.removeprefix(prefix) for line in answers.getvalue().splitlines()))
    return ExitStatus.DONE


def _refuse(error: Exception, arguments: Sequence[str]) -> int:
    message = " ".join(cast(typer.BadParameter, error).format_message().split()).rstrip(".")
    for other, name in _OTHER_NAMES.items():
        unknown = f"No such command '{other}'"
        if message == unknown or message.startswith(f"{unknown}."):  # Typer may name a similar one
            message = f"{unknown}. Did you mean '{name}'?"
    context = getattr(error, "ctx", None)
    path = "cairn" if context is None else context.command_path
    end = "" if message.endswith("?") else "."
    _tell(usage_problem(message), f"{message}{end} See `{path} --help`.", arguments)
    return ExitStatus.USAGE


def _path_advice(error: Exception, arguments: Sequence[str]) -> str:
    """Say how to write a path, if a name that the server does not have is a run's folder here."""
    if isinstance(error, ProblemResponseError):
        if error.problem.get("type") not in _NOT_THERE:
            return ""
    elif not isinstance(error, ServerUnreachableError):
        return ""
    for text in arguments[1:]:
        folder = text.partition("@")[0].partition("/steps/")[0]
        if not is_in_store(text) and (Path(folder) / RUN_FILE).is_file():
            return f" For a path, write ./{text}."
    return ""


def _tell(problem: dict[str, Any], line: str, arguments: Sequence[str]) -> None:
    if "--json" in arguments:
        print(as_json(problem), file=sys.stderr)
    else:
        errors.print(f"cairn: {line}", style="red", soft_wrap=True)


def _end_quietly() -> int:
    _drop_output()
    return ExitStatus.READER_GONE


def _drop_output() -> None:
    """Redirect standard output to /dev/null: at exit, Python flushes it and would fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
