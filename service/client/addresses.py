"""How a shell names a checkpoint: `run`, `run@alias`, `run@best:METRIC` or `run/steps/N`."""

import re
from dataclasses import dataclass
from typing import Final

from cairn.service.client.best_step import BEST, best_step
from cairn.service.client.client import Client
from cairn.service.errors import AddressError, NoCheckpointError

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ADDRESS: Final = re.compile(
    rf"(?P<run>{_NAME})"
    rf"(?:@{BEST}(?P<best>(?s:.+))|@(?P<alias>{_NAME})|/steps/(?P<step>0|[1-9][0-9]{{0,15}}))?"
)


@dataclass(frozen=True)
class Address:
    """A checkpoint of a run; by nothing else: its latest.

    Attributes:
        run: Name of the run.
        alias: Name of an alias, or None.
        step: A step, or None.
        best: The metric that it is the best by, with `:min` or `:max` or as steps say, or None.
    """

    run: str
    alias: str | None = None
    step: int | None = None
    best: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read an address.

        Raises:
            AddressError: It is none.
        """
        found = _ADDRESS.fullmatch(text)
        if found is None or found["best"] in (":min", ":max"):
            raise AddressError(
                f"{text!r}: expected RUN, RUN@ALIAS, RUN@best:METRIC or RUN/steps/N, with names of "
                "letters, digits, '.', '_' and '-', found another form. `cairn runs` lists what "
                "exists."
            )
        step = found["step"]
        number = None if step is None else int(step)
        return cls(found["run"], found["alias"], number, found["best"])

    def __str__(self) -> str:
        """As it is written."""
        if self.step is not None:
            return f"{self.run}/steps/{self.step}"
        if self.best is not None:
            return f"{self.run}@{BEST}{self.best}"
        return self.run if self.alias is None else f"{self.run}@{self.alias}"

    @property
    def is_run(self) -> bool:
        """Whether it names a run and nothing else."""
        return self.alias is None and self.step is None and self.best is None


def find_step(client: Client, address: Address, root: str) -> tuple[str, int]:
    """The run and step that an address means now.

    Raises:
        AddressError: It is the best by a metric of which nobody said which values are good.
        NoCheckpointError: The run has no checkpoint yet, or none with a value of the metric, or
            the alias's was set aside and its step saved anew.
        ProblemResponseError: There is no such run or alias.
    """
    if address.best is not None:
        return address.run, best_step(client, address.run, address.best, root)
    if address.step is not None:
        return address.run, address.step
    if address.alias is not None:
        alias = client.alias(address.run, address.alias, root=root, refresh=True)
        listed = client.checkpoint(address.run, alias.step, root=root)
        if listed.attempt != alias.attempt:
            raise NoCheckpointError(
                f"{address}: expected step {alias.step} of attempt {alias.attempt}, to which the "
                f"alias was moved, found that of attempt {listed.attempt}: it was set aside, and "
                "saved anew. Promote the new one, or read the old one in the store by its alias."
            )
        return address.run, alias.step
    latest = client.run(address.run, root=root, refresh=True).latest_step
    if latest is None:
        raise NoCheckpointError(
            f"{address.run}: expected a run with a checkpoint, found none listed. "
            f"`cairn checkpoints {address.run} --state all` shows what is there."
        )
    return address.run, latest
