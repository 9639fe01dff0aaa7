"""`cairn keys`: creates, lists and revokes keys in the database, which needs no key itself."""

import getpass
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cairn.service.command.options import DataOption, administered, console, errors, parse_duration
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.command.secret_files import SecretFileOption, secret_file
from cairn.service.schemas import (
    MAX_GRACE_SECONDS,
    NAME_PATTERN,
    KeyList,
    KeyRequest,
    Scope,
)

if TYPE_CHECKING:
    from cairn.service.access.callers import Caller
    from cairn.service.actions.plane import ControlPlane

keys_app: Final = typer.Typer(
    help="Create, list and revoke keys, in the server's database.",
    no_args_is_help=True,
)


def _name(text: str) -> str:
    if re.fullmatch(NAME_PATTERN, text) is None:
        raise typer.BadParameter(
            f"{text!r} is not a valid name: use letters, digits, '.', '_' and '-', 128 at most"
        )
    return text


def _names(texts: list[str] | None) -> list[str] | None:
    return None if texts is None else [_name(text) for text in texts]


@keys_app.command()
def create(
    name: Annotated[
        str,
        typer.Option(metavar="NAME", callback=_name, help="Name of the caller, for the audit log."),
    ],
    scope: Annotated[Scope, typer.Option(help="What the caller may do.")] = Scope.READ,
    root: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", callback=_names, help="Only for this root; may be repeated."),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Lifetime, such as 90d; default: until it is revoked."),
    ] = None,
    output: SecretFileOption = None,
    data_dir: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Create a key and print it; it can't be shown again."""
    from cairn.service.actions import keys  # imports what a server needs

    lifetime = None if expires is None else parse_duration(expires)
    if lifetime is not None and not 0 < lifetime <= MAX_GRACE_SECONDS:
        raise typer.BadParameter(
            f"{expires!r} is not a valid lifetime: a hundred years at most, such as 90d"
        )
    request = KeyRequest(name=name, scope=scope, roots=root or None, expires_seconds=lifetime)
    # The file first: if it cannot be created, no key is made whose secret is lost.
    with secret_file(output) as file, _plane(data_dir) as (plane, caller):
        created = keys.create_key(plane, caller, request)
        if file is not None:
            file.write(f"{created.key}\n")
    if json:
        print_document(created if output is None else created.details)
        return
    use = f"It is saved in {output}; set CAIRN_KEY_FILE to that path."
    if output is None:
        print(created.key)
        use = "Set it as CAIRN_KEY or save it to CAIRN_KEY_FILE. It won't be shown again."
    errors.print(f"Key ID {created.details.id}. {use}", soft_wrap=True)


@keys_app.command("list")
def list_keys(data_dir: DataOption = None, json: JsonOption = False) -> None:
    """List the keys, without their secrets."""
    from cairn.service.actions import keys  # imports what a server needs

    with _plane(data_dir) as (plane, _):
        listed = keys.list_keys(plane)
    if json:
        print_document(KeyList(keys=listed))
        return
    titles = ("key", "name", "scope", "roots", "active", "created (UTC)", "expires", "last used")
    rows = (
        (
            key.id,
            key.name,
            key.scope.value,
            "all" if key.roots is None else ", ".join(key.roots),
            "yes" if key.counts else "no",
            key.created,
            key.expires,
            key.last_used,
        )
        for key in listed
    )
    print_table(console, titles, rows)


@keys_app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key ID, from `cairn keys list`.")],
    data_dir: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Revoke a key for good.

    Running servers refuse it within seconds.
    """
    from cairn.service.actions import keys  # imports what a server needs

    with _plane(data_dir) as (plane, caller):
        revoked = keys.revoke_key(plane, caller, key)
    if json:
        print_document(revoked)
        return
    print(f"key {key} revoked")


@contextmanager
def _plane(data_dir: Path | None) -> "Iterator[tuple[ControlPlane, Caller]]":
    """Open the control plane of the settings, without jobs; the caller is the shell's user."""
    from cairn.service.access.callers import Caller
    from cairn.service.actions.plane import ControlPlane
    from cairn.service.catalog.engine import Catalog
    from cairn.service.catalog.refresh import Index
    from cairn.service.catalog.roots import Roots

    settings = administered(data_dir)
    settings.prepare()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user in a container may have no name
        user = "unknown"
    catalog = Catalog.open(settings.database_url, auto_upgrade=settings.auto_upgrade)
    try:
        plane = ControlPlane(settings, Roots(catalog, settings.root_uris), Index(catalog), None)
        yield plane, Caller(f"shell:{user}", Scope.ADMIN)
    finally:
        catalog.close()
