"""Opaque page tokens: where the next page starts, bound to the list it belongs to."""

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
from cairn.service.schemas import LARGEST_NUMBER, is_plain

Key = tuple[Any, ...]
"""Of an entry of a list: parts of text, whole numbers, numbers, times, or None."""

_NOT_ONE: Final = object()


def encode_token(listing: str, last: Sequence[Any]) -> str:
    """The token of the page after `last`.

    Args:
        listing: What is listed, filters included; the token is good for nothing else.
        last: Sort key of the last entry given out.
    """
    parts = [one.isoformat() if isinstance(one, datetime) else one for one in last]
    body = json.dumps([listing, *parts], separators=(",", ":"), ensure_ascii=False)
    return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")


def decode_token(
    listing: str, token: str | None, *, kinds: Sequence[type | tuple[type, ...]]
) -> Key:
    """The sort key that a token names; empty without a token.

    Args:
        listing: As given to `encode_token`.
        token: From the client.
        kinds: Type of each part of the key, or several.

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
    if isinstance(body, list) and len(body) == 1 + len(kinds) and body[0] == listing:
        key = tuple(map(_read, body[1:], kinds))
        if _NOT_ONE not in key:
            return key
    detail = (
        "expected the next_page_token of a page of this very list, with the same filters and the "
        "same order; found another text. Start again without it."
    )
    field = "query.page_token"
    raise InvalidRequestError(f"{field}: {detail}", errors=[{"field": field, "detail": detail}])


@dataclass(frozen=True)
class CountedList:
    """A list that is gone through by how many of its entries are known already.

    Attributes:
        listing: What is listed, as `encode_token` takes it.
        after: How many entries are known.
    """

    listing: str
    after: int

    @classmethod
    def at(cls, kind: str, asked: Iterable[object], token: str | None) -> "CountedList":
        """Where a request begins.

        Args:
            kind: Of the list.
            asked: What it is of, filters included.
            token: From the client.

        Raises:
            InvalidRequestError: The token is not one, or belongs to another list.
        """
        text = "\n".join(map(str, asked))
        listing = f"{kind} {hashlib.sha256(text.encode()).hexdigest()}"
        (known,) = decode_token(listing, token, kinds=(int,)) or (0,)
        return cls(listing, max(0, int(known)))

    def token(self, count: int, *, more: bool) -> str | None:
        """The token of the page after one of so many entries; None: it is the last."""
        return encode_token(self.listing, (self.after + count,)) if more else None


def _read(part: Any, kind: type | tuple[type, ...]) -> Any:
    """A part of a key, or `_NOT_ONE`."""
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
        and not (isinstance(part, int) and abs(part) > LARGEST_NUMBER)
        and not (isinstance(part, float) and math.isnan(part))
    )
    return part if fits else _NOT_ONE
