"""Shared parts of the commands: parameters, consoles, the report of an operation."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console

from cairn.service.client.client import Client
from cairn.service.command import completion
from cairn.service.command.output.documents import print_document
from cairn.service.command.watch import (
    as_json,
    on_console,
    result_lines,
    result_of,
    watch_operation,
)
from cairn.service.filters.expressions import quote
from cairn.service.schemas import MAX_GRACE_SECONDS, Operation
from cairn.storage.errors import UnsupportedFormatError
from cairn.storage.safetensors.sizes import parse_size

if TYPE_CHECKING:
    from cairn.service.settings import Settings  # imported late: it takes a while

console: Final = Console(highlight=False, markup=False)
errors: Final = Console(stderr=True, highlight=False, markup=False)

UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Control plane; default: CAIRN_URL.")
]
RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="NAME",
        help="Root of the store that the run is in; default: the only one that has it.",
        autocompletion=completion.roots,
    ),
]
NewRunRootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="NAME",
        help="Root of the store to create the run in; default: `default`.",
        autocompletion=completion.roots,
    ),
]
FilterOption = Annotated[
    str,
    typer.Option(
        "--filter", metavar="FILTER", help="Only those of which it holds, as in: step >= 100."
    ),
]
OrderOption = Annotated[
    str, typer.Option("--order-by", "--sort", metavar="FIELDS", help="Such as: created desc, step.")
]
StoreOption = Annotated[
    str | None, typer.Option(metavar="URI", help="Folder or URI of the root `default`.")
]
AdoptFromOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder outside the root `default` whose checkpoints its runs may list. May be "
        "given again.",
    ),
]
DataOption = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where the databases are.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Show progress until it has ended.")]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="RUN, RUN@ALIAS, RUN@best:METRIC, RUN/steps/N; or URI or path.",
        autocompletion=completion.checkpoints,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Such as bfloat16; default: as stored.",
        autocompletion=completion.dtypes,
    ),
]
FormatOption = Annotated[
    Literal["huggingface", "gguf"], typer.Option(help="gguf: one file for llama.cpp.")
]
LoraOption = Annotated[
    Literal["merge", "keep"] | None,
    typer.Option(help="Adapters: merged (the default), or kept for PEFT."),
]
AllowNonfiniteOption = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Export NaN and infinity as well.")
]
CheckLogitsOption = Annotated[
    bool, typer.Option("--check-logits", help="Compute logits with both; they have to agree.")
]
ReferenceLogitsOption = Annotated[
    str | None,
    typer.Option(
        "--reference-logits",
        metavar="FILE",
        help="Tokens and logits that the trainer computed: the export has to agree with them.",
    ),
]
TrainerConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Of a step that MaxText or Tunix stored: its config.yml, or a config.json.",
    ),
]
DespiteDamageOption = Annotated[
    str | None,
    typer.Option(
        "--despite-damage",
        metavar="REASON",
        help="Use a damaged step all the same; kept in the audit trail.",
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="RUN or ROOT/RUN; or URI or path.", autocompletion=completion.runs
    ),
]


def _as_size(text: str) -> str:
    """Check that a text is a size, and return it unchanged."""
    try:
        parse_size(text)
    except UnsupportedFormatError as exc:
        raise typer.BadParameter(
            f"expected {exc.expected}, found {exc.found}".replace('"', "")
        ) from exc
    return text


_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([smhdw]?)")


def parse_duration(text: str) -> float:
    """Parse a duration, `90s`, `30m`, `12h`, `7d`, `2w`, or a number of seconds; return seconds.

    Raises:
        BadParameter: `text` is not a duration.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter(
            "expected a number with s, m, h, d or w (seconds, minutes, hours, days, weeks), "
            f"such as 12h or 7d, found {text!r}"
        )
    return float(match[1]) * _UNITS[match[2]]


def joined_filter(
    filter: str, values: Mapping[str, str | int | None], *, moment: str, since: float | None
) -> str:
    """Return a filter that joins what a command's options ask for.

    Args:
        filter: Filter that the user has typed; may be empty.
        values: Values of fields; None: any.
        moment: Field of an entry's time.
        since: Only entries within so many seconds before now; None: at any time.
    """
    parts = [
        f"{field} = {quote(value) if isinstance(value, str) else value}"
        for field, value in values.items()
        if value is not None
    ]
    if since is not None:
        first = datetime.now(UTC) - timedelta(seconds=min(since, MAX_GRACE_SECONDS))
        parts.append(f"{moment} >= {first.isoformat()}")
    if filter.strip():
        parts.insert(0, f"({filter})" if parts else filter)
    return " AND ".join(parts)


SIZE: Final[dict[str, Any]] = {"metavar": "SIZE", "parser": _as_size}
"""Arguments of `typer.Option` for a size in bytes."""

ShardSizeOption = Annotated[
    str, typer.Option(help="Of one file, such as 500MB, 5GB or 5GiB.", **SIZE)
]

TIME: Final[dict[str, Any]] = {"metavar": "TIME", "parser": parse_duration}
"""Arguments of `typer.Option` for a duration; the command gets seconds."""


def administered(data_dir: Path | None) -> "Settings":
    """Load the settings of the server to administer; print which store and database are meant.

    Raises:
        SettingsError: A setting cannot work, or there are several servers to choose from.
    """
    from cairn.service.settings import load_administered

    settings, owner = load_administered(data_dir)
    name_place(settings, owner)
    return settings


def _shown(url: str) -> str:
    """Return the URL of a database without its password."""
    from sqlalchemy import make_url  # takes a while
    from sqlalchemy.exc import ArgumentError

    from cairn.service.observability.redaction import redact

    try:
        return redact(repr(make_url(url)))
    except ArgumentError:  # the text may have a password anywhere
        return "a database whose URL is malformed"


def name_place(settings: "Settings", store: str | None = None) -> None:
    """Print on standard error which store and which databases the settings mean.

    Args:
        settings: Settings of the server.
        store: Store of the data folder, if it is another than that of the settings.
    """
    stores = store or ", ".join(map(str, settings.root_uris.values()))
    place = place_of_databases(settings)
    errors.print(f"Of the store {stores}, in {place}", soft_wrap=True, markup=False)


def place_of_databases(settings: "Settings") -> str:
    """Return the folder of the databases, or their URLs if they are elsewhere."""
    databases = dict.fromkeys((settings.database_url, settings.jobs_database_url))
    own = all(url.startswith(f"sqlite:///{settings.data_dir.absolute()}/") for url in databases)
    return str(settings.data_dir) if own else ", ".join(map(_shown, databases))


def report(client: Client, operation: Operation, watch: bool, json: bool) -> None:
    """Follow an operation and print its result, or print how to follow it.

    Args:
        client: Client of the control plane.
        operation: Current state of the operation.
        watch: Follow the operation to its end.
        json: Print the API's JSON: every state with `watch`, else the current one.
    """
    if not watch:
        if json:
            print_document(operation)
            return
        print(operation.id)
        errors.print(f"`cairn watch {operation.id}` follows it.", soft_wrap=True)
        return
    if json:
        watch_operation(client, operation, as_json(client))
        return
    last = watch_operation(client, operation, on_console(errors))
    for line in result_lines(result_of(client, last)):
        print(line)
