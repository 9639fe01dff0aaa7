"""The `cairn` command as a shell runs it, and what it says without a process of its own."""

import io
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from tests.programs.program import Program, run
from tests.service.seams import cli, failures, logs, options

CAIRN = ("-m", "cairn")
ExitStatus = failures.ExitStatus
MEANINGS = failures.MEANINGS
"""Of each exit status, as the help says it."""


def whole_command() -> Any:
    """Return `cairn` with all that stands below it."""
    return typer.main.get_command(cli.app)


def environment(url: str | None = None, **variables: str) -> dict[str, str]:
    """Ours without any setting of Cairn's, then these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAIRN_")}
    address = {} if url is None else {"CAIRN_URL": url}
    return {**kept, "COLUMNS": "80", **address, **variables}


def cairn(
    *arguments: str, url: str | None = None, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it, with standard output and error piped."""
    return run([*CAIRN, *arguments], env=environment(url, **variables), cwd=cwd, timeout=120)


def cairn_here(
    *arguments: str, url: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it in this process, with standard output and error piped.

    For what a command does and says; a process of its own takes half a second to start.
    """
    output, errors = io.StringIO(), io.StringIO()
    status: object = 0
    with (
        _logging_as_before(),
        patch.dict(os.environ, environment(url, **variables), clear=True),
        patch.object(sys, "argv", ["cairn", *arguments]),
        patch.object(options.console, "no_color", True),  # made when stdout was a terminal, maybe
        patch.object(options.errors, "no_color", True),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        try:
            cli.main()
        except SystemExit as ending:
            status = ending.code or 0
    assert isinstance(status, int), status  # a text would be printed by the interpreter
    return subprocess.CompletedProcess(
        ["cairn", *arguments], status, output.getvalue(), errors.getvalue()
    )


@contextmanager
def _logging_as_before() -> Iterator[None]:
    """What a server says of its log in this process is forgotten: other tests read theirs."""
    named = (None, "cairn", "sqlalchemy", *logs.LIBRARIES)
    loggers = [logging.getLogger(name) for name in named]
    before = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for one, handlers, level, propagates in before:
            one.handlers[:], one.propagate = handlers, propagates
            one.setLevel(level)


def cairn_on_a_terminal(
    *arguments: str, url: str, typed: str = "", is_live: bool = False
) -> tuple[int, str]:
    """Run it on an 80-column terminal; its exit status and everything it showed.

    Args:
        arguments: Of the command.
        url: Of the control plane.
        typed: What is typed before it asks.
        is_live: It draws over itself. Rich decides when it is imported whether it may, so that
            takes an interpreter that is started on the terminal.
    """
    master, slave = pty.openpty()
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    variables = environment(url, TERM="xterm")
    process: subprocess.Popen[bytes] | Program
    if is_live:
        command = [sys.executable, *CAIRN, *arguments]
        process = subprocess.Popen(command, env=variables, start_new_session=True, **streams)
    else:
        process = Program([*CAIRN, *arguments], env=variables, **streams)
    os.close(slave)
    os.write(master, typed.encode())
    shown = bytearray()
    while chunk := _read(master):
        shown += chunk
    os.close(master)
    return process.wait(120), shown.decode()


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # Linux's end of file of a terminal
        return b""
