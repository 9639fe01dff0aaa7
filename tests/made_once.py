"""What libraries make anew at each call, and tests share: certificates, and the tree of commands.

httpx reads the certificates of all authorities for each client, those of `http://` too, which takes
13 ms of CPU; Typer builds all of the command's subcommands at each call, for 14.
"""

import functools
import ssl
from typing import Any

import certifi
import typer.main

_make_context = ssl.create_default_context


@functools.cache
def _of_authorities() -> ssl.SSLContext:
    return _make_context(cafile=certifi.where())


def _context(*arguments: Any, **options: Any) -> ssl.SSLContext:
    if not arguments and options == {"cafile": certifi.where()}:
        return _of_authorities()
    return _make_context(*arguments, **options)


def make_once() -> None:
    """Have both made once, in this process and its forks."""
    ssl.create_default_context = _context
    typer.main.get_command = functools.cache(typer.main.get_command)


def make_now() -> None:
    """Make both: forks of this process find them made."""
    from cairn.service.command import cli

    _of_authorities()
    typer.main.get_command(cli.app)
