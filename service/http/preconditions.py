"""`If-Match` and `If-None-Match` on aliases: what a change is based on."""

import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header

from cairn.service.errors import InvalidRequestError, PreconditionRequiredError

_ETAG = re.compile(r'"(0|[1-9][0-9]{0,17})"')


@dataclass(frozen=True)
class Expectation:
    """What a change to an alias rests on.

    Attributes:
        sequence: The alias must be at this sequence number; None: it must not exist.
    """

    sequence: int | None


def expectation(
    if_match: Annotated[
        str | None,
        Header(description='ETag of the alias as last seen, such as `"3"`.', max_length=64),
    ] = None,
    if_none_match: Annotated[
        str | None, Header(description="`*`: only create the alias.", max_length=64)
    ] = None,
) -> Expectation:
    """The precondition of a request that changes an alias.

    Raises:
        PreconditionRequiredError: Neither header is given.
        InvalidRequestError: Both are, or one has another form.
    """
    if if_match is None and if_none_match is None:
        raise PreconditionRequiredError(
            'expected If-Match: "<sequence>" with the ETag of the alias as last seen, or '
            "If-None-Match: * to create it; found neither. GET the alias for its ETag."
        )
    if if_match is not None and if_none_match is not None:
        raise _invalid("header.if-match", "expected one of If-Match and If-None-Match, found both")
    if if_match is None:
        if if_none_match != "*":
            raise _invalid("header.if-none-match", f"expected *, found {if_none_match!r}")
        return Expectation(None)
    match = _ETAG.fullmatch(if_match.strip())
    if match is None:
        raise _invalid(
            "header.if-match", f'expected one ETag such as "3", quotes included; found {if_match!r}'
        )
    return Expectation(int(match.group(1)))


def _invalid(field: str, detail: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])


ExpectationDependency = Annotated[Expectation, Depends(expectation)]
