"""Origins of the value files of the last durable step: which step wrote each.

Names of value files are random, and a link keeps the name: a file whose name an earlier step had is
shared with it, whichever process linked it. Imports no JAX.
"""

from collections.abc import Iterable

from cairn.storage.arrays.ocdbt import holds_values

__all__ = ["FileOrigins"]

Origin = tuple[int, int]
"""(step, attempt)."""


class FileOrigins:
    """Origins of the last durable step's value files, as process 0 knows them."""

    def __init__(self) -> None:
        """Start without any: this process has not saved the run yet."""
        self._known: dict[str, Origin] = {}

    def of(self, names: Iterable[str]) -> dict[str, Origin]:
        """Return the origins of those files that an earlier step wrote."""
        return {name: self._known[name] for name in names if name in self._known}

    def remember(self, names: Iterable[str], *, step: int, attempt: int) -> None:
        """Store the origins of a durable step's files."""
        self._known = {
            name: self._known.get(name, (step, attempt)) for name in names if holds_values(name)
        }
