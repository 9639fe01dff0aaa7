"""Opaque page tokens: the position where the next page starts, valid for one list only."""

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from cairn.service.errors import InvalidRequestError
from cairn.service.schemas import MAX_NUMBER, is_plain

Key = tuple[Any, ...]
"""Sort key of a list's entry. Its parts are texts, integers, floats, moments or None."""

_NOT_ONE: Final = object()


def encode_token(listing: str, last: Sequence[Any]) -> str:
    """Encode the token of the page after `last`.

    Args:
        listing: Description of the list, filters included; the token is valid for this list only.
        last: Sort key of the last entry that was sent.
    """
    parts = [key.isoformat() if isinstance(key, datetime) else key for key in last]
    body = json.dumps([listing, *parts], separators=(",", ":"), ensure_ascii=False)
    return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")


def decode_token(
    listing: str, token: str | None, *, kinds: Sequence[type | tuple[type, ...]]
) -> Key:
    """Decode a token into a sort key; the key is empty without a token.

    Args:
        listing: Value that was passed to `encode_token`.
        token: Token from the client.
        kinds: Type of each part of the key, or its possible types.

    Raises:
        InvalidRequestError: The token is invalid, or belongs to another list.
    """
    if token is None:
        return ()
    try:
        padded = token + "=" * (-len(token) % 4)
        body = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, UnicodeDecodeError, ValueError, RecursionError):
        body = None
    if isinstance(body, list) and len(body) == 1 + len(kinds) and body[0] == listing:
        key = tuple(map(_read, body[1:], kinds))
        if _NOT_ONE not in key:
            return key
    detail = (
        "this is no next_page_token of this list with the same filters and the same order. Start "
        "again without it."
    )
    field = "query.page_token"
    raise InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])


@dataclass(frozen=True)
class CountedList:
    """Position in a list whose pages are counted by entries.

    Attributes:
        listing: Description of the list, for `encode_token`.
        after: Number of entries before this page.
    """

    listing: str
    after: int

    @classmethod
    def at(cls, kind: str, parameters: Iterable[object], token: str | None) -> "CountedList":
        """Decode the token of a request into a position; without a token, the start of the list.

        Args:
            kind: Kind of list.
            parameters: Subject of the list, filters included.
            token: Token from the client.

        Raises:
            InvalidRequestError: The token is invalid, or belongs to another list.
        """
        text = "\n".join(map(str, parameters))
        listing = f"{kind} {hashlib.sha256(text.encode()).hexdigest()}"
        (count,) = decode_token(listing, token, kinds=(int,)) or (0,)
        return cls(listing, max(0, int(count)))

    def token(self, count: int, *, more: bool) -> str | None:
        """Encode the token of the next page; None: this is the last page.

        Args:
            count: Number of entries on this page.
            more: There are entries after this page.
        """
        return encode_token(self.listing, (self.after + count,)) if more else None


def _read(part: Any, kind: type | tuple[type, ...]) -> Any:
    """Convert a decoded part of a sort key to its type; `_NOT_ONE`: the part has another type."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if datetime in kinds and isinstance(part, str):
        try:
            moment = datetime.fromisoformat(part)
            return _NOT_ONE if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            return _NOT_ONE
    fits = (
        type(part) in kinds
        and is_plain(part)
        and not (isinstance(part, int) and abs(part) > MAX_NUMBER)
        and not (isinstance(part, float) and math.isnan(part))
    )
    return part if fits else _NOT_ONE
