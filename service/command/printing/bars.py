"""Bars that tell how many bytes are done."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["bytes_bar"]


def bytes_bar(console: Console) -> Progress:
    """A bar for one task, whose numbers are bytes; nothing where the console is no terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        expand=True,
        disable=not console.is_terminal,
    )
