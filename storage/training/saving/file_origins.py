"""Which step wrote the value files of the last durable step: what a step shares with others.

Names of value files are random, and a linked file keeps its name: one that an earlier step had is
shared with it, whichever process linked it. Imports no JAX.
"""

from collections.abc import Iterable

from cairn.storage.arrays import holds_values

__all__ = ["FileOrigins"]

Origin = tuple[int, int]
"""(step, attempt)."""


class FileOrigins:
    """The origins of the value files of the last durable step, as process 0 knows them."""

    def __init__(self) -> None:
        """Of a run that this process has not saved yet."""
        self._known: dict[str, Origin] = {}

    def of(self, names: Iterable[str]) -> dict[str, Origin]:
        """Which step wrote a file, of those that an earlier one than this has written."""
        return {name: self._known[name] for name in names if name in self._known}

    def remember(self, names: Iterable[str], *, step: int, attempt: int) -> None:
        """A step with these files is durable."""
        self._known = {
            name: self._known.get(name, (step, attempt)) for name in names if holds_values(name)
        }
