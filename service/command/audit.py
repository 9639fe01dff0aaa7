"""`cairn audit`: shows the audit trail."""

import json as json_text
from itertools import islice
from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command import completion
from cairn.service.command.options import TIME, FilterOption, UrlOption, console, joined_filter
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.schemas import AuditEventList

app: Final = typer.Typer()


@app.command()
def audit(
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="About this run.", autocompletion=completion.runs),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="About this root.", autocompletion=completion.roots),
    ] = None,
    action: Annotated[
        str | None, typer.Option(metavar="ACTION", help="Such as alias.promote.")
    ] = None,
    caller: Annotated[str | None, typer.Option(metavar="NAME", help="Asked by this one.")] = None,
    since: Annotated[
        float | None, typer.Option(help="Within this time before now, such as 7d.", **TIME)
    ] = None,
    filter: FilterOption = "",
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="At most so many; 0: all.")] = 100,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show the audit trail, newest entry first.

    Only administrators of all roots may read it. A FILTER joins conditions with AND, OR, NOT:
    outcome = refused AND NOT caller = "ci". Fields: at, caller, action, root, run, outcome.
    """
    named = {"run": run, "root": root, "action": action, "caller": caller}
    whole = joined_filter(filter, named, moment="at", since=since)
    with Client(url) as client:
        size = min(limit or 1000, 1000)
        every = client.audit_events(filter=whole, page_size=size)
        entries = islice(every, limit or None)
        if json:
            print_document(AuditEventList(audit_events=list(entries)))
            return
        titles = ("at (UTC)", "caller", "action", "root", "run", "outcome", "detail")
        rows = (
            (
                entry.at,
                entry.caller,
                entry.action,
                entry.root,
                entry.run,
                entry.outcome,
                json_text.dumps(entry.detail, ensure_ascii=False),
            )
            for entry in entries
        )
        print_table(console, titles, rows)
