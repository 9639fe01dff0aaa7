"""Preconditions of a request: which generation or metageneration it insists on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tests.gcs.errors import InvalidRequestError, NotModifiedError, PreconditionError


def without_conditions(query: Mapping[str, str]) -> dict[str, str]:
    """A query as a server sees it that knows no preconditions."""
    return {name: text for name, text in query.items() if not re.fullmatch(r"if\w+Match", name)}


class Versioned(Protocol):
    """What a condition looks at: an object or a bucket."""

    @property
    def generation(self) -> int: ...

    @property
    def metageneration(self) -> int: ...


@dataclass(frozen=True)
class Conditions:
    """The four `if...Match` parameters; 0 as a generation stands for "no such object"."""

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None

    @classmethod
    def parse(cls, query: Mapping[str, str], prefix: str = "if") -> Conditions:
        """Reads the parameters of a query; `prefix` is `ifSource` for the source of a copy."""

        def number(name: str) -> int | None:
            text = query.get(prefix + name)
            if text is None:
                return None
            if not text.isdecimal():
                raise InvalidRequestError(f"Invalid value for {prefix + name}: {text!r}")
            return int(text)

        return cls(
            generation_match=number("GenerationMatch"),
            generation_not_match=number("GenerationNotMatch"),
            metageneration_match=number("MetagenerationMatch"),
            metageneration_not_match=number("MetagenerationNotMatch"),
        )

    def check_write(self, current: Versioned | None) -> None:
        """Holds a change against what is stored now.

        Raises:
            PreconditionError: if a condition fails.
        """
        generation = current.generation if current else 0
        metageneration = current.metageneration if current else 0
        if self.generation_match is not None and self.generation_match != generation:
            raise PreconditionError("ifGenerationMatch")
        if self.generation_not_match is not None and self.generation_not_match == generation:
            raise PreconditionError("ifGenerationNotMatch")
        if self.metageneration_match is not None and self.metageneration_match != metageneration:
            raise PreconditionError("ifMetagenerationMatch")
        if self.metageneration_not_match is not None and (
            self.metageneration_not_match == metageneration
        ):
            raise PreconditionError("ifMetagenerationNotMatch")

    def check_read(self, current: Versioned) -> None:
        """Holds a read against what is stored now.

        Raises:
            PreconditionError: if a `Match` fails.
            NotModifiedError: if a `NotMatch` fails: the reader has this version already.
        """
        if (
            self.generation_not_match == current.generation
            or self.metageneration_not_match == current.metageneration
        ):
            raise NotModifiedError
        self.check_write(current)
