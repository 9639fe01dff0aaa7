"""What commands print for programs, with `--json`: the API's shapes.

A command prints one document. What goes on is a line for each object, as it comes: `cairn watch`,
and `--watch` of others. Then standard error has nothing but a problem, if there is one.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from pydantic import BaseModel

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def print_document(body: BaseModel | Mapping[str, Any]) -> None:
    """Print all that there is to say, well laid out."""
    print(json.dumps(_plain(body), indent=2))


def print_line(body: BaseModel | Mapping[str, Any]) -> None:
    """Print one of several, at once."""
    print(json.dumps(_plain(body)), flush=True)


def _plain(body: BaseModel | Mapping[str, Any]) -> Mapping[str, Any]:
    return body.model_dump(mode="json") if isinstance(body, BaseModel) else body
