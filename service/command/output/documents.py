"""Output of `--json` for programs, in the forms of the API.

Most commands print one document. `cairn watch`, and commands with `--watch`, print one object on
each line, as it comes. Standard error then has at most one problem.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from pydantic import BaseModel

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def print_document(body: BaseModel | Mapping[str, Any]) -> None:
    """Print a document as indented JSON."""
    print(json.dumps(_plain(body), indent=2))


def print_line(body: BaseModel | Mapping[str, Any]) -> None:
    """Print an object as one line of JSON, and flush: a reader may wait for it."""
    print(json.dumps(_plain(body)), flush=True)


def _plain(body: BaseModel | Mapping[str, Any]) -> Mapping[str, Any]:
    return body.model_dump(mode="json") if isinstance(body, BaseModel) else body
