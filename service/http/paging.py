"""Opaque page tokens: where the next page starts, bound to the list it belongs to."""

import base64
import binascii
import json
from collections.abc import Sequence

from cairn.service.errors import InvalidRequestError
from cairn.service.schemas import LARGEST_NUMBER, is_plain

Key = Sequence[str | int]


def encode_token(listing: str, last: Key) -> str:
    """The token of the page after `last`.

    Args:
        listing: What is listed, filters included; the token is good for nothing else.
        last: Sort key of the last entry given out.
    """
    body = json.dumps([listing, *last], separators=(",", ":"))
    return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")


def decode_token(
    listing: str, token: str | None, *, kinds: tuple[type, ...]
) -> tuple[str | int, ...]:
    """The sort key that a token names; empty without a token.

    Args:
        listing: As given to `encode_token`.
        token: From the client.
        kinds: Type of each part of the key.

    Raises:
        InvalidRequestError: The token is not one, or belongs to another list.
    """
    if token is None:
        return ()
    try:
        padded = token + "=" * (-len(token) % 4)
        body = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, UnicodeDecodeError, ValueError, RecursionError):
        body = None
    fits = (
        isinstance(body, list)
        and len(body) == 1 + len(kinds)
        and body[0] == listing
        and all(type(part) is kind for part, kind in zip(body[1:], kinds, strict=True))
        and is_plain(body)
        and all(abs(part) <= LARGEST_NUMBER for part in body if isinstance(part, int))
    )
    if not isinstance(body, list) or not fits:
        detail = (
            "expected the next_page_token of a page of this very list, with the same filters; "
            "found another text. Start again without it."
        )
        field = "query.page_token"
        raise InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])
    return tuple(body[1:])
