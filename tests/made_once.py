"""What libraries make anew at each call, and tests share: certificates, and the tree of commands.

httpx reads the certificates of all authorities for each client, those of `http://` too, which takes
13 ms of CPU; Typer builds all of the command's subcommands at each call, for 14.
"""

import functools
import ssl
from typing import Any

import typer.main

_make_context = ssl.create_default_context


@functools.cache
def _of_authorities(file: str) -> ssl.SSLContext:
    return _make_context(cafile=file)


def _context(*arguments: Any, **options: Any) -> ssl.SSLContext:
    file = options.get("cafile", "")
    if arguments or len(options) != 1 or not file.endswith("certifi/cacert.pem"):
        return _make_context(*arguments, **options)
    return _of_authorities(file)


def make_once() -> None:
    """Have both made once, in this process and its forks."""
    ssl.create_default_context = _context
    typer.main.get_command = functools.cache(typer.main.get_command)


def make_now() -> None:
    """Make both: forks of this process find them made."""
    import httpx

    from cairn.service.command import cli

    httpx.create_ssl_context()
    typer.main.get_command(cli.app)
