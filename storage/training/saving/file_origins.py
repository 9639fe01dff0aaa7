"""Which step wrote the value files of the last durable step: what a step shares with others.

Names of value files are random, and a linked file keeps its name: one that an earlier step had is
shared with it, whichever process linked it. Imports no JAX.
"""

from collections.abc import Iterable

from cairn.storage.arrays import VALUE_FOLDER
from cairn.storage.runs import SharedFiles

__all__ = ["FileOrigins"]

Origin = tuple[int, int]
"""(step, attempt)."""


class FileOrigins:
    """The origins of the value files of the last durable step, as process 0 knows them."""

    def __init__(self) -> None:
        """Of a run that this process has not saved yet."""
        self._known: dict[str, Origin] = {}

    def shared(self, names: Iterable[str]) -> tuple[SharedFiles, ...]:
        """What a step with these files shares with the steps that wrote them, oldest first."""
        found: dict[Origin, list[str]] = {}
        for name in sorted(names):
            if name in self._known:
                found.setdefault(self._known[name], []).append(name)
        return tuple(
            SharedFiles(step=step, attempt=attempt, files=tuple(files))
            for (step, attempt), files in sorted(found.items())
        )

    def remember(self, names: Iterable[str], *, step: int, attempt: int) -> None:
        """A step with these files is durable."""
        self._known = {
            name: self._known.get(name, (step, attempt)) for name in names if _holds_values(name)
        }


def _holds_values(name: str) -> bool:
    """Whether a file of a step is a value file of some process: "item/…/d/name"."""
    *item, folder, _ = ["", *name.split("/")]
    return len(item) > 1 and folder == VALUE_FOLDER
