"""Names of checkpoints in a shell: `run`, `run@alias`, `run@best:METRIC` or `run/steps/N`.

`root/` may stand before each.
"""

import re
from dataclasses import dataclass
from typing import Final

from cairn.service.errors import AddressError
from cairn.storage.store.uri import RUN_NAME

BEST: Final = "best:"
LATEST: Final = "latest"
"""Name that no alias can have: `run@latest` is `run`."""
_ALIAS: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ROOT: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_ADDRESS: Final = re.compile(
    rf"(?:(?P<root>{_ROOT})/)?(?P<run>{RUN_NAME})"
    rf"(?:@{BEST}(?P<best>(?s:.+))|@(?P<alias>{_ALIAS})|/steps/(?P<step>0|[1-9][0-9]{{0,15}}))?"
)


@dataclass(frozen=True)
class Address:
    """Address of a checkpoint; with only a run, its latest checkpoint.

    Attributes:
        run: Name of the run.
        alias: Name of an alias, or None.
        step: A step, or None.
        best: Metric whose best step is meant, or None; `:min` or `:max` at its end gives the
            direction, else the steps' own direction counts.
        root: Name of the run's root, or None.
    """

    run: str
    alias: str | None = None
    step: int | None = None
    best: str | None = None
    root: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read an address.

        Raises:
            AddressError: The text is not an address.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or match["best"] in (":min", ":max"):
            raise AddressError(
                f"{text!r}: expected RUN, RUN@ALIAS, RUN@best:METRIC or RUN/steps/N, or one of "
                "these after ROOT/, with names of letters, digits, '.', '_' and '-', of runs '=' "
                "and '+' too, found another form. `cairn runs` lists what exists."
            )
        step = match["step"]
        number = None if step is None else int(step)
        alias = None if match["alias"] == LATEST else match["alias"]
        return cls(match["run"], alias, number, match["best"], match["root"])

    def __str__(self) -> str:
        """Return the address as `parse` reads it."""
        run = self.run if self.root is None else f"{self.root}/{self.run}"
        if self.step is not None:
            return f"{run}/steps/{self.step}"
        if self.best is not None:
            return f"{run}@{BEST}{self.best}"
        return run if self.alias is None else f"{run}@{self.alias}"

    @property
    def is_run(self) -> bool:
        """True if the address names only a run."""
        return self.alias is None and self.step is None and self.best is None
