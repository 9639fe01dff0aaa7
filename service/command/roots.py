"""`cairn roots`: lists the roots that hold runs, adds roots to the catalog and removes them."""

from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command import completion
from cairn.service.command.options import UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.schemas import RootList

roots_app: Final = typer.Typer(help="List roots, add and remove some.", invoke_without_command=True)


@roots_app.callback()
def roots(context: typer.Context, url: UrlOption = None, json: JsonOption = False) -> None:
    """List the roots, and whether settings or catalog name them."""
    if context.invoked_subcommand is not None:
        return
    with Client(url) as client:
        listed = client.roots()
    if json:
        print_document(RootList(roots=listed))
        return
    print_table(
        console, ("root", "uri", "source"), ((root.name, root.uri, root.source) for root in listed)
    )


@roots_app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the new root.")],
    uri: Annotated[
        str, typer.Argument(metavar="URI", help="Its folder on the server, or gs:// or s3://.")
    ],
    adopt_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder outside it whose checkpoints its runs may list. May be given again.",
        ),
    ] = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Add a root, for every server and worker of the catalog.

    Nothing is written to it.
    """
    with Client(url) as client:
        added = client.add_root(name, uri, adopt_from=adopt_from or ())
    if json:
        print_document(added)
        return
    print(f"root {added.name} is {added.uri}")


@roots_app.command()
def remove(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Of a root that was added.", autocompletion=completion.roots
        ),
    ],
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Stop serving a root; its store stays as it is."""
    with Client(url) as client:
        client.remove_root(name)
        left = client.roots()
    if json:
        print_document(RootList(roots=left))
        return
    print(f"root {name} removed")
