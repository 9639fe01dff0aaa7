"""What the demo prints: numbered steps as they go, a summary table at the end."""

import sys
import time

from rich.console import Console
from rich.table import Table


class DemoFailedError(AssertionError):
    """Something that the demo promises did not hold."""


class Report:
    """Prints progress and collects the rows of the summary."""

    def __init__(self, console: Console | None = None) -> None:
        width = None if sys.stdout.isatty() else 120  # in a log, nobody's window decides
        self.console = console or Console(highlight=False, soft_wrap=True, width=width)
        self._rows: list[tuple[str, str, str]] = []
        self._began = time.perf_counter()

    def step(self, letter: str, title: str) -> None:
        """Announces a step of the demo."""
        elapsed = time.perf_counter() - self._began
        self.console.print(f"\n[bold cyan]{letter})[/] [bold]{title}[/]  [dim]{elapsed:.0f} s[/]")

    def say(self, text: str) -> None:
        """Prints one line below the current step."""
        self.console.print(f"   {text}")

    def check(self, letter: str, what: str, holds: bool, found: str) -> None:
        """Adds a row to the summary.

        Raises:
            DemoFailedError: The promise does not hold.
        """
        mark = "[green]yes[/]" if holds else "[red]NO[/]"
        self.console.print(f"   {mark}  {what}: {found}")
        self._rows.append((letter, what, found))
        if not holds:
            raise DemoFailedError(f"step {letter}: expected: {what}; found: {found}")

    def summary(self) -> None:
        """Prints every promise with the figure that was seen."""
        table = Table(title=f"Seen to hold, in {time.perf_counter() - self._began:.0f} s")
        for column in ("step", "promise", "seen"):
            table.add_column(column, overflow="fold")
        for row in self._rows:
            table.add_row(*row)
        self.console.print()
        self.console.print(table)
