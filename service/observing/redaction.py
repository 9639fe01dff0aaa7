"""Takes out of a text what nobody may read in a log: passwords, keys, cookies, SQL's values.

Every repetition that something else has to follow is bounded: clients send some of these texts, and
an unbounded one would be tried from each of its signs to its end.
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
    # A key of ours: its id may be read, its secret not.
    re.compile(r"(?P<kept>\bck_[A-Za-z0-9]{1,64}_)[A-Za-z0-9_~+/=-]+"),
    # What messages to a webhook are signed with.
    re.compile(r"(?P<kept>\bwhsec_)[A-Za-z0-9_~+/=-]+"),
    # The password in a URL. It may hold "@" and "/" that nobody has escaped: up to the last "@".
    re.compile(
        r"(?P<kept>\b[A-Za-z][A-Za-z0-9+.-]{0,32}://[^\s/:@'\"]{0,256}:)[^\s'\"<>]{1,1024}(?=@)"
    ),
    # Headers, as they are or as a map of them is written.
    re.compile(rf"(?P<kept>\b(?:{_HEADERS})\b['\"]?\s*[:=,]\s*b?['\"]?)[^'\"\r\n]+", re.IGNORECASE),
    re.compile(r"(?P<kept>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    # Values of a query, of a connection string, or of a map, by their name.
    re.compile(
        rf"(?P<kept>\b(?:{_NAMES})\b(?:['\"]?\s*=|['\"]\s*:)\s*b?['\"]?)[^\s'\"&;]+", re.IGNORECASE
    ),
    re.compile(r"(?P<kept>[?&;](?:key|sig)=)[^\s'\"&]+", re.IGNORECASE),
    # What PostgreSQL tells of a row, and SQLAlchemy of a statement's parameters.
    re.compile(r"(?P<kept>\bDETAIL:\s*)[^\r\n]+"),
    re.compile(r"(?P<kept>\[parameters:\s*)[^\r\n]+"),
)
# Each pattern needs one of these, in any case: most texts have none.
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
    """The text, with `***` in the place of each secret."""
    folded = text.casefold()  # as the patterns do, for letters such as the Kelvin sign
    if not any(sign in folded for sign in _SIGNS):
        return text
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return text


def names_a_secret(key: str) -> bool:
    """Whether what is kept under this name is one."""
    return _SECRET_KEY.fullmatch(key) is not None
