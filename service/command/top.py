"""`cairn top`: live view of runs, saves in flight and jobs."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cairn.service.client.client import Client
from cairn.service.command import completion
from cairn.service.command.activity import Activity, ByteProgress, SnapshotSource
from cairn.service.command.addresses import check_run, resolve_run
from cairn.service.command.options import TIME, UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.listings import kind_name, subject
from cairn.service.command.output.tables import Cell, print_table, table_of
from cairn.service.errors import ClientError
from cairn.service.sizes import Size, size_text

app: Final = typer.Typer()

_RUNS: Final = ("root", "run", "latest", "checkpoints", "damaged", "size", "created (UTC)")
_SAVES: Final = ("root", "run", "step", "attempt", "written", "latest step has", "a second")
_JOBS: Final = ("operation", "kind", "state", "done", "total", "a second", "of", "message")
_SECONDS: Final = 2.0
_KEYS_THAT_END: Final = b"qQ\x04"  # Ctrl-D; Ctrl-C is a signal


@app.command()
def top(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="RUN, ROOT/RUN or URI; default: the newest runs.",
            autocompletion=completion.runs,
        ),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only this root of the store.", autocompletion=completion.roots
        ),
    ] = None,
    most: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Show so many runs.")] = 10,
    every: Annotated[
        float | None, typer.Option(help="Between two looks, such as 5s; default: 2s.", **TIME)
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Live view of runs, saves and jobs, until q or Ctrl-C.

    For a save, it shows the bytes in the store and, from the second time on, how fast they grow: a
    bucket shows an object only once it is complete. If standard output is not a terminal, the
    command prints once and ends.
    """
    for name in runs or ():
        check_run(name)
    seconds = _SECONDS if every is None else every
    if seconds <= 0:
        raise typer.BadParameter("--every: expected more than no time, found 0")
    with Client(url, retry_seconds=min(seconds, _SECONDS)) as client:  # it is asked again soon
        places = [resolve_run(client, name, root) for name in runs] if runs else None
        source = SnapshotSource(client, root, places, most)
        first = source.snapshot()
        if json:
            print_document(first.document())
        elif console.is_terminal:
            _watch(console, first, source.snapshot, seconds)
        else:
            # One table below the other, with their titles even if they have no rows.
            print_table(console, _RUNS, _run_rows(first))
            for titles, rows in ((_SAVES, _save_rows(first)), (_JOBS, _job_rows(first))):
                print(file=console.file)
                print_table(console, titles, rows)


def _watch(console: Console, first: Activity, look: Callable[[], Activity], every: float) -> None:
    """Show new snapshots until a key or Ctrl-C; show an error of the server, and try again later.

    Args:
        console: Terminal.
        first: First snapshot.
        look: Function that takes a snapshot.
        every: Seconds between two snapshots.
    """
    latest, problem = first, ""
    with (
        suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(_frame(latest, problem), console=console, screen=True, auto_refresh=False) as live,
    ):
        while not pressed(every):
            try:
                latest, problem = look(), ""
            except ClientError as error:
                problem = str(error)
            live.update(_frame(latest, problem), refresh=True)


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds, and returns True if a key ends the command.

    During the block, the terminal passes on each key at once, without Enter.
    """
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios  # exists on Unix only
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _pressed(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while select.select([sys.stdin], [], [], max(0.0, until - time.monotonic()))[0]:
        pressed = os.read(sys.stdin.fileno(), 64)
        if not pressed or any(key in _KEYS_THAT_END for key in pressed):
            return True  # also after an empty read: the terminal is gone
    return False


def _frame(activity: Activity, problem: str) -> RenderableType:
    title = Text(f"cairn top  {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC  q ends it", style="bold")
    parts: list[RenderableType] = [title]
    if problem:
        parts.append(Text(f"{problem} What is below is older.", style="red"))
    more = ", those that were made last" if activity.more else ""
    for name, titles, rows in (
        (f"jobs ({len(activity.jobs)})", _JOBS, _job_rows(activity)),
        (f"saves in flight ({len(activity.saves)})", _SAVES, _save_rows(activity)),
        (f"runs ({len(activity.runs)}{more})", _RUNS, _run_rows(activity)),
    ):
        parts += [Text(f"\n{name}", style="bold"), table_of(titles, rows) if rows else Text("none")]
    return Group(*parts)


def _run_rows(activity: Activity) -> list[tuple[Cell, ...]]:
    return [
        (
            *(run.root, run.name, run.latest_step),
            *(run.checkpoint_count, run.damaged_count or None, Size(run.bytes)),
            run.created,
        )
        for run in activity.runs
    ]


def _save_rows(activity: Activity) -> list[tuple[Cell, ...]]:
    return [
        (save.root, save.run, save.step, save.attempt, *_sizes(save.written))
        for save in activity.saves
    ]


def _job_rows(activity: Activity) -> list[tuple[Cell, ...]]:
    return [
        (
            job.id,
            kind_name(job),
            job.state.value,
            *_sizes(rated),
            subject(job),
            job.progress.message,
        )
        for job, rated in activity.jobs
    ]


def _sizes(rated: ByteProgress | None) -> tuple[Cell, Cell, Cell]:
    if rated is None:
        return None, None, None
    total = None if rated.total is None else Size(rated.total)
    rate = None if rated.rate is None else f"{size_text(int(rated.rate))}/s"
    return Size(rated.bytes), total, rate
