"""Preconditions of changes: the headers `If-Match` and `If-None-Match`."""

import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header
from pydantic import BaseModel

from cairn.service.errors import (
    AliasMovedError,
    InvalidRequestError,
    PreconditionRequiredError,
    ResourceChangedError,
)
from cairn.service.http.entity_tags import body_etag

_TAG = re.compile(r'"[!#-~]*"')
_TAGS = r'^(\*|"[!#-~]*"(\s*,\s*"[!#-~]*")*)$'
_ETAG = re.compile(r'^"(0|[1-9][0-9]{0,17})"$')


@dataclass(frozen=True)
class Expectation:
    """Precondition of a change to an alias.

    Attributes:
        sequence: The alias must have this sequence number; None: the alias must not exist.
        impossible: The request has both headers: the alias must have `sequence`, and must not
            exist.
    """

    sequence: int | None
    impossible: bool = False

    def require_possible(self) -> None:
        """Raise if no alias can fulfil the precondition.

        Raises:
            AliasMovedError: The request has both headers.
        """
        if self.impossible:
            raise AliasMovedError(
                "No alias can be as last seen (If-Match) and missing (If-None-Match). Send one of "
                "the two."
            )


@dataclass(frozen=True)
class Seen:
    """Precondition of a change: the ETags that the client sent in `If-Match`.

    Attributes:
        tags: The resource must have one of these ETags; None: the client sent `*`, so any will do.
    """

    tags: frozenset[str] | None

    def require(self, current: BaseModel) -> None:
        """Raise unless the resource's ETag is one of `tags`.

        Raises:
            ResourceChangedError: The resource has another ETag, so it has changed.
        """
        if self.tags is not None and body_etag(current) not in self.tags:
            raise ResourceChangedError(
                "It has changed since it was last seen (If-Match). `current` is how it is now: "
                "decide again, or send `If-Match: *` to change it whatever it is.",
                extra={"current": current.model_dump(mode="json")},
            )


Condition = Annotated[str | None, Header(max_length=2000)]
"""`If-Match`, `If-None-Match` or `If-Range` of a request that reads."""

IfMatch = Annotated[
    str | None,
    Header(
        description='ETag of the alias as last seen, such as `"3"`.',
        max_length=64,
        json_schema_extra={"pattern": _ETAG.pattern},
    ),
]
IfNoneMatch = Annotated[
    str | None,
    Header(
        description="`*`: only create the alias.",
        max_length=64,
        json_schema_extra={"enum": ["*"]},
    ),
]
Tags = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description="ETag of the resource as last seen, or `*`.",
        max_length=2000,
        json_schema_extra={"pattern": _TAGS},
    ),
]


async def last_seen(if_match: IfMatch = None) -> int:
    """Parse `If-Match` into the sequence number that the client has seen.

    Raises:
        PreconditionRequiredError: The header is missing.
        InvalidRequestError: The header has another form.
    """
    if not if_match:
        raise PreconditionRequiredError(
            'Send If-Match: "<sequence>" with the ETag of the alias as last seen (GET the alias).'
        )
    match = _ETAG.fullmatch(if_match.strip())
    if match is None:
        raise _invalid(
            "header.if-match", f'{if_match!r} is not one ETag such as "3", quotes included'
        )
    return int(match.group(1))


async def expectation(if_match: IfMatch = None, if_none_match: IfNoneMatch = None) -> Expectation:
    """Parse the precondition of a request that creates or moves an alias.

    Raises:
        PreconditionRequiredError: Both headers are missing.
        InvalidRequestError: A header has another form.
    """
    if not if_match and not if_none_match:
        raise PreconditionRequiredError(
            'Send If-Match: "<sequence>" with the ETag of the alias as last seen (GET the alias), '
            "or If-None-Match: * to create it."
        )
    if if_none_match and if_none_match != "*":
        raise _invalid("header.if-none-match", f"only * is allowed here, not {if_none_match!r}")
    if not if_match:
        return Expectation(None)
    sequence = await last_seen(if_match)
    return Expectation(sequence, impossible=bool(if_none_match))


async def seen(if_match: Tags = None) -> Seen:
    """Parse `If-Match` into ETags, of which the resource must have one.

    Raises:
        PreconditionRequiredError: The header is missing.
        InvalidRequestError: The header has another form.
    """
    if not if_match:
        raise PreconditionRequiredError(
            "Send If-Match with the ETag of the resource as last seen (GET it), or `If-Match: *` "
            "to change it whatever it is."
        )
    tags = if_match.strip()
    if re.fullmatch(_TAGS, tags) is None:
        raise _invalid("header.if-match", f"{if_match!r} has no ETags in quotes, and is not *")
    # Commas do not separate ETags here, since an ETag may have one.
    return Seen(None if tags == "*" else frozenset(_TAG.findall(tags)))


async def maybe_seen(if_match: Tags = None) -> Seen | None:
    """Parse `If-Match` as `seen` does; return None if the header is missing.

    Raises:
        InvalidRequestError: The header has another form.
    """
    return None if if_match is None else await seen(if_match)


def _invalid(field: str, detail: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])


ExpectationDependency = Annotated[Expectation, Depends(expectation)]
MaybeSeenDependency = Annotated[Seen | None, Depends(maybe_seen)]
SeenDependency = Annotated[Seen, Depends(seen)]
LastSeenDependency = Annotated[int, Depends(last_seen)]
