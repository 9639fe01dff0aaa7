"""`cairn keys`: creates, lists and revokes keys.

A control plane that the caller has a key for is asked. Without one, the database is changed, which
needs no key.
"""

import getpass
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from cairn.service.client.client import Client
from cairn.service.command.options import (
    DataOption,
    UrlOption,
    administered,
    console,
    errors,
    parse_duration,
)
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.command.secret_files import SecretFileOption, secret_file
from cairn.service.errors import SettingsError
from cairn.service.observability.redaction import redact
from cairn.service.schemas import (
    MAX_GRACE_SECONDS,
    NAME_PATTERN,
    Key,
    KeyList,
    KeyRequest,
    NewKey,
    Scope,
)

keys_app: Final = typer.Typer(
    help="""Create, list and revoke keys.

    With --url, or with CAIRN_URL and a key, the control plane is asked. Otherwise the database of
    the settings is changed, as for the first key.
    """,
    no_args_is_help=True,
)

_OF_A_DATABASE: Final = ("CAIRN_DATA_DIR", "CAIRN_DATABASE_URL", "CAIRN_ROOT", "CAIRN_ROOTS")
"""Variables that say which server's database is meant."""


@dataclass(frozen=True)
class ServerKeys:
    """The keys of a control plane that is asked over HTTP."""

    client: Client

    def create(self, request: KeyRequest) -> NewKey:
        """Create a key."""
        return self.client.create_key(
            request.name,
            scope=request.scope.value,
            roots=request.roots,
            expires_seconds=request.expires_seconds,
        )

    def all(self) -> list[Key]:
        """Return all keys, without their secrets."""
        return self.client.keys()

    def revoke(self, key: str) -> Key:
        """Revoke a key, and return it."""
        self.client.revoke_key(key)
        listed = {every.id: every for every in self.all()}
        return listed[key]


class DatabaseKeys(NamedTuple):
    """The keys in the database of the settings: the same three actions."""

    create: Callable[[KeyRequest], NewKey]
    all: Callable[[], list[Key]]
    revoke: Callable[[str], Key]


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
    url: UrlOption = None,
    data_dir: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Create a key and print it; it can't be shown again."""
    lifetime = None if expires is None else parse_duration(expires)
    if lifetime is not None and not 0 < lifetime <= MAX_GRACE_SECONDS:
        raise typer.BadParameter(
            f"{expires!r} is not a valid lifetime: a hundred years at most, such as 90d"
        )
    request = KeyRequest(name=name, scope=scope, roots=root or None, expires_seconds=lifetime)
    # The file first: if it cannot be created, no key is made whose secret is lost.
    with secret_file(output) as file, _keys(url, data_dir) as keys:
        created = keys.create(request)
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
def list_keys(url: UrlOption = None, data_dir: DataOption = None, json: JsonOption = False) -> None:
    """List the keys, without their secrets."""
    with _keys(url, data_dir) as keys:
        listed = keys.all()
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
    url: UrlOption = None,
    data_dir: DataOption = None,
    json: JsonOption = False,
) -> None:
    """Revoke a key for good.

    Running servers refuse it within seconds.
    """
    with _keys(url, data_dir) as keys:
        revoked = keys.revoke(key)
    if json:
        print_document(revoked)
        return
    print(f"key {key} revoked")


@contextmanager
def _keys(url: str | None, data_dir: Path | None) -> Iterator[ServerKeys | DatabaseKeys]:
    """Open the keys that the options or else the environment mean, and print whose they are.

    Raises:
        SettingsError: Both a control plane and a database are meant.
    """
    if url is not None and data_dir is not None:
        raise SettingsError(
            "--url names a control plane, and --data-dir its database. Give one of them."
        )
    address = url or os.environ.get("CAIRN_URL")
    has_key = bool(os.environ.get("CAIRN_KEY") or os.environ.get("CAIRN_KEY_FILE"))
    if url is None and data_dir is None and address and has_key:
        databases = [name for name in _OF_A_DATABASE if os.environ.get(name)]
        if databases:
            raise SettingsError(
                f"Two places fit: the control plane at {address} (CAIRN_URL and a key are set), "
                f"and a database ({' and '.join(databases)}). Say which: --url URL, or "
                "--data-dir FOLDER."
            )
        url = address
    if url is None:
        with _database(data_dir) as keys:
            yield keys
        return
    with Client(url) as client:
        errors.print(f"Of the control plane {redact(url)}", soft_wrap=True)
        yield ServerKeys(client)


@contextmanager
def _database(data_dir: Path | None) -> Iterator[DatabaseKeys]:
    # Here, since they import what a server needs.
    from cairn.service.access.callers import Caller
    from cairn.service.actions import keys
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
        caller = Caller(f"shell:{user}", Scope.ADMIN)
        yield DatabaseKeys(
            partial(keys.create_key, plane, caller),
            partial(keys.list_keys, plane),
            partial(keys.revoke_key, plane, caller),
        )
    finally:
        catalog.close()
