"""How a shell names a checkpoint: `run`, `run@alias` or `run/steps/N`."""

import re
from dataclasses import dataclass
from typing import Final

from cairn.service.client.client import Client
from cairn.service.errors import AddressError, NoCheckpointError

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ADDRESS: Final = re.compile(
    rf"(?P<run>{_NAME})(?:@(?P<alias>{_NAME})|/steps/(?P<step>0|[1-9][0-9]{{0,15}}))?"
)


@dataclass(frozen=True)
class Address:
    """A checkpoint of a run; neither alias nor step: its latest.

    Attributes:
        run: Name of the run.
        alias: Name of an alias, or None.
        step: A step, or None.
    """

    run: str
    alias: str | None = None
    step: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read an address.

        Raises:
            AddressError: It is none.
        """
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise AddressError(
                f"{text!r}: expected RUN, RUN@ALIAS or RUN/steps/N, with names of letters, digits, "
                "'.', '_' and '-', found another form. `cairn runs` lists what exists."
            )
        step = found["step"]
        return cls(found["run"], found["alias"], None if step is None else int(step))

    def __str__(self) -> str:
        """As it is written."""
        if self.step is not None:
            return f"{self.run}/steps/{self.step}"
        return self.run if self.alias is None else f"{self.run}@{self.alias}"


def find_step(client: Client, address: Address, root: str) -> tuple[str, int]:
    """The run and step that an address means now.

    Raises:
        NoCheckpointError: The run has no checkpoint yet.
        ProblemResponseError: There is no such run or alias.
    """
    if address.step is not None:
        return address.run, address.step
    if address.alias is not None:
        return address.run, client.alias(address.run, address.alias, root=root, refresh=True).step
    latest = client.run(address.run, root=root, refresh=True).latest_step
    if latest is None:
        raise NoCheckpointError(
            f"{address.run}: expected a run with a checkpoint, found none listed. "
            f"`cairn checkpoints {address.run} --state all` shows what is there."
        )
    return address.run, latest
