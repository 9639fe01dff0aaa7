"""Origins of the data files of the last durable step: which step wrote each.

Names of data files are random, and a link keeps the name: a file whose name an earlier step had is
shared with it, whichever process linked it. Imports no JAX.
"""

from collections.abc import Iterable

from cairn.storage.arrays.ocdbt import is_data_file

__all__ = ["FileOrigins"]

Origin = tuple[int, int]
"""(step, attempt)."""


class FileOrigins:
    """Origins of the last durable step's data files, as process 0 knows them."""

    def __init__(self) -> None:
        """Start without any: this process has not saved the run yet."""
        self._known: dict[str, Origin] = {}

    def of(self, names: Iterable[str]) -> dict[str, Origin]:
        """Return the origins of those files that an earlier step wrote."""
        return {name: self._known[name] for name in names if name in self._known}

    def remember(self, names: Iterable[str], *, step: int, attempt: int) -> None:
        """Store the origins of a durable step's files."""
        self._known = {
            name: self._known.get(name, (step, attempt)) for name in names if is_data_file(name)
        }
