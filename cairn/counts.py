"""Nouns with their numbers, for sentences."""

from collections.abc import Mapping
from typing import Final

__all__ = ["count_text"]

_PLURALS: Final[Mapping[str, str]] = {
    "alias": "aliases",
    "entry": "entries",
    "leaf": "leaves",
    "process": "processes",
}


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 step`, `2,000 steps`, `3 leaves`.

    Args:
        number: how many.
        noun: noun in the singular, with or without more words behind it.
        plural: the same in the plural; "": by rule.
    """
    many = plural or _PLURALS.get(noun, f"{noun}s")
    return f"{number:,} {noun if number == 1 else many}"
