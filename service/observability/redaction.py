"""Removal of secrets from log texts: passwords, keys, cookies, values of SQL statements.

Every repetition in the middle of a pattern is bounded. Clients send some of these texts, and an
unbounded repetition would be tried from every character to the end: quadratic time (ReDoS).
"""

import re
from typing import Final

HIDDEN: Final = "***"

_NAMES: Final = (
    r"[a-z0-9_.-]{0,64}(?:password|passwd|secret|token|api[_-]?key|access[_-]?key|signature"
    r"|credential)s?"
)
_HEADERS: Final = r"(?:proxy-)?authorization|(?:set-)?cookie|x-[a-z-]{0,64}(?:key|token)"

_SECRETS: Final = (
    # A key of Cairn: its id may be read, its secret not.
    re.compile(r"(?P<kept>\bck_[A-Za-z0-9]{1,64}_)[A-Za-z0-9_~+/=-]+"),
    # The secret that signs a webhook's messages.
    re.compile(r"(?P<kept>\bwhsec_)[A-Za-z0-9_~+/=-]+"),
    # The password in a URL. It may have an unescaped "@" or "/", so it goes up to the last "@".
    re.compile(
        r"(?P<kept>\b[A-Za-z][A-Za-z0-9+.-]{0,32}://[^\s/:@'\"]{0,256}:)[^\s'\"<>]{1,1024}(?=@)"
    ),
    # Headers, in HTTP's form or in the form of a Python dict.
    re.compile(rf"(?P<kept>\b(?:{_HEADERS})\b['\"]?\s*[:=,]\s*b?['\"]?)[^'\"\r\n]+", re.IGNORECASE),
    re.compile(r"(?P<kept>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    # Values of a query, a connection string or a dict, by their name.
    re.compile(
        rf"(?P<kept>\b(?:{_NAMES})\b(?:['\"]?\s*=|['\"]\s*:)\s*b?['\"]?)[^\s'\"&;]+", re.IGNORECASE
    ),
    re.compile(r"(?P<kept>[?&;](?:key|sig)=)[^\s'\"&]+", re.IGNORECASE),
    # Row values in PostgreSQL's errors, and statement parameters in SQLAlchemy's.
    re.compile(r"(?P<kept>\bDETAIL:\s*)[^\r\n]+"),
    re.compile(r"(?P<kept>\[parameters:\s*)[^\r\n]+"),
)
# A fast check before the patterns: each pattern needs one of these, in any case, and most texts
# have none.
_SIGNS: Final = (
    *(
        "ck_",
        "whsec_",
        "://",
        "authorization",
        "cookie",
        "key",
        "token",
        "bearer",
        "basic",
        "passw",
    ),
    *("secret", "signature", "credential", "sig=", "detail:", "[parameters:"),
)
_SECRET_KEY: Final = re.compile(rf"{_NAMES}|{_HEADERS}", re.IGNORECASE)


def redact(text: str) -> str:
    """Replace each secret in a text by `***`."""
    folded = text.casefold()  # IGNORECASE also matches letters such as the Kelvin sign
    if not any(sign in folded for sign in _SIGNS):
        return text
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return text


def names_a_secret(key: str) -> bool:
    """Return whether values with this name are secret."""
    return _SECRET_KEY.fullmatch(key) is not None
