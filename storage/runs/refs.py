"""How a checkpoint is addressed: "run", "run@alias", "run@latest" or "run/steps/N"."""

import os
import re
from dataclasses import dataclass

from cairn.storage.errors import InvalidURIError
from cairn.storage.runs.layout import check_alias
from cairn.storage.store import StoreURI, parse_uri

__all__ = ["CheckpointRef", "parse_ref"]

_STEP = re.compile(r"^(?:0|[1-9][0-9]{0,17})\Z")


@dataclass(frozen=True)
class CheckpointRef:
    """A run, and which of its steps: an alias, a step, or neither (the latest).

    Attributes:
        run: the run's folder.
        alias: alias name, or None.
        step: step number, or None.
    """

    run: StoreURI
    alias: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        if self.alias is not None:
            return f"{self.run}@{self.alias}"
        return str(self.run) if self.step is None else f"{self.run}/steps/{self.step}"


def parse_ref(text: StoreURI | str | os.PathLike[str]) -> CheckpointRef:
    """The checkpoint that "run", "run@alias", "run@latest" or "run/steps/N" names.

    Raises:
        InvalidURIError: the URI or the alias is malformed, or both an alias and a step are given.
    """
    given = str(text) if isinstance(text, StoreURI) else os.fspath(text)
    head, at, alias = given.rpartition("@")
    if at and "/" not in alias:
        uri = parse_uri(head)
        if _step_of(uri) is not None:
            raise InvalidURIError(
                "ambiguous checkpoint",
                path=repr(given),
                expected="an alias or a step",
                found="both",
                next_step="Leave one of them out.",
            )
        return CheckpointRef(
            uri, alias=None if alias == "latest" else check_alias(alias, within=given)
        )
    uri = parse_uri(given)
    step = _step_of(uri)
    return CheckpointRef(uri) if step is None else CheckpointRef(uri.parent.parent, step=step)


def _step_of(uri: StoreURI) -> int | None:
    """N of ".../steps/N", or None; "steps/007" is a mistake, not a run's name."""
    segments = uri.path.split("/")
    if len(segments) < 3 or segments[-2] != "steps":
        return None
    if not _STEP.match(segments[-1]):
        raise InvalidURIError(
            "invalid step",
            path=uri,
            expected="…/run/steps/N, N a plain number",
            found=repr(segments[-1]),
            next_step="Give the step's number, or the run alone for its latest step.",
        )
    return int(segments[-1])
