"""Takes out of a text what nobody may read in a log: passwords, keys, cookies, SQL's values."""

import re
from typing import Final

HIDDEN: Final = "***"

_SECRETS: Final = (
    # A key of ours: its id may be read, its secret not.
    re.compile(r"(?P<kept>\bck_[A-Za-z0-9]+_)[A-Za-z0-9_~+/=-]+"),
    # The password in a URL. It may hold an "@" that nobody has escaped: up to the last one.
    re.compile(r"(?P<kept>\b[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@'\"]*:)[^\s/'\"]+(?=@)"),
    # Headers, as they are or as some language writes a map of them.
    re.compile(
        r"(?P<kept>\b(?:proxy-)?authorization\b['\"]?,?\s*[:=,]?\s*b?['\"]?)"
        r"(?:(?:bearer|basic|digest|negotiate)\s+)?[^\s'\",;)\]}]+",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<kept>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    re.compile(
        r"(?P<kept>\b(?:set-)?cookie\b['\"]?,?\s*[:=,]\s*b?['\"]?)[^'\"\r\n]+", re.IGNORECASE
    ),
    # Values of a query, of a connection string, or of a map, by their name.
    re.compile(
        r"(?P<kept>\b[A-Za-z0-9_.-]*(?:password|passwd|secret|token|api[_-]?key|access[_-]?key|"
        r"signature|credential)s?\b['\"]?\s*[:=]\s*b?['\"]?)[^\s'\"&,;)\]}]+",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<kept>[?&;]key=)[^\s'\"&]+", re.IGNORECASE),
    # What PostgreSQL tells of the row, and SQLAlchemy of the statement's parameters.
    re.compile(r"(?P<kept>\bDETAIL:\s*)[^\r\n]+"),
    re.compile(r"(?P<kept>\[parameters:\s*)[^\r\n]+"),
)


def redact(text: str) -> str:
    """The text, with `***` in the place of each secret."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return text
