"""`If-Match` and `If-None-Match` on aliases: what a change is based on."""

import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header
from pydantic import BaseModel

from cairn.service.errors import AliasMovedError, InvalidRequestError, PreconditionRequiredError
from cairn.service.http.entity_tags import body_etag

_TAG = re.compile(r'"[!#-~]*"')
_TAGS = r'^(\*|"[!#-~]*"(\s*,\s*"[!#-~]*")*)$'
_ETAG = re.compile(r'^"(0|[1-9][0-9]{0,17})"$')


@dataclass(frozen=True)
class Expectation:
    """What a change to an alias rests on.

    Attributes:
        sequence: The alias must be at this sequence number; None: it must not exist.
        impossible: And it must not exist, either.
    """

    sequence: int | None
    impossible: bool = False

    def require_possible(self) -> None:
        """Refuse what no alias can fulfil.

        Raises:
            AliasMovedError: It is so.
        """
        if self.impossible:
            raise AliasMovedError(
                "expected one of If-Match and If-None-Match, found both: no alias is as last seen "
                "and missing"
            )


@dataclass(frozen=True)
class Seen:
    """How a resource was last seen by who asks for a change.

    Attributes:
        tags: Its ETags; one of them must be that of now. None: any will do.
    """

    tags: frozenset[str] | None

    def fits(self, body: BaseModel) -> bool:
        """Whether a resource with this body is as it was seen."""
        return self.tags is None or body_etag(body) in self.tags


Condition = Annotated[str | None, Header(max_length=2000)]
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
"""`If-Match`, `If-None-Match` or `If-Range` on what is read."""
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
    """The sequence number that an alias had when it was last seen.

    Raises:
        PreconditionRequiredError: The header is not given.
        InvalidRequestError: It has another form.
    """
    if not if_match:
        raise PreconditionRequiredError(
            'expected If-Match: "<sequence>" with the ETag of the alias as last seen, found none. '
            "GET the alias for its ETag."
        )
    match = _ETAG.fullmatch(if_match.strip())
    if match is None:
        raise _invalid(
            "header.if-match", f'expected one ETag such as "3", quotes included; found {if_match!r}'
        )
    return int(match.group(1))


async def expectation(if_match: IfMatch = None, if_none_match: IfNoneMatch = None) -> Expectation:
    """The precondition of a request that creates or moves an alias.

    Raises:
        PreconditionRequiredError: Neither header is given.
        InvalidRequestError: One has another form.
    """
    if not if_match and not if_none_match:
        raise PreconditionRequiredError(
            'expected If-Match: "<sequence>" with the ETag of the alias as last seen, or '
            "If-None-Match: * to create it; found neither. GET the alias for its ETag."
        )
    if if_none_match and if_none_match != "*":
        raise _invalid("header.if-none-match", f"expected *, found {if_none_match!r}")
    if not if_match:
        return Expectation(None)
    sequence = await last_seen(if_match)
    return Expectation(sequence, impossible=bool(if_none_match))


async def seen(if_match: Tags = None) -> Seen:
    """What a change of a resource is based on.

    Raises:
        PreconditionRequiredError: The header is not given.
        InvalidRequestError: It has another form.
    """
    if not if_match:
        raise PreconditionRequiredError(
            "expected If-Match with the ETag of the resource as last seen, or `If-Match: *` to "
            "change it whatever it is; found none. GET it for its ETag."
        )
    given = if_match.strip()
    if re.fullmatch(_TAGS, given) is None:
        raise _invalid("header.if-match", f"expected ETags in quotes, or *; found {if_match!r}")
    return Seen(None if given == "*" else frozenset(_TAG.findall(given)))  # they may have commas


async def maybe_seen(if_match: Tags = None) -> Seen | None:
    """As `seen`; None if the header is not given."""
    return None if if_match is None else await seen(if_match)


def _invalid(field: str, detail: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])


ExpectationDependency = Annotated[Expectation, Depends(expectation)]
MaybeSeenDependency = Annotated[Seen | None, Depends(maybe_seen)]
SeenDependency = Annotated[Seen, Depends(seen)]
LastSeenDependency = Annotated[int, Depends(last_seen)]
