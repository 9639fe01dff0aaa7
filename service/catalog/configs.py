"""Config of a run's model as lists show and search it: numbers and short texts by name. Pure."""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

MAX_ENTRIES: Final = 200
"""Largest number of entries of a config that are kept."""

LONGEST_TEXT: Final = 200
"""Largest number of characters of an entry's name, or of its text; longer texts are cut."""

_EXACT: Final = 2**53  # integers that a float holds


def flat_config(config: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the first entries of a config; names of nested ones are joined by "/".

    Truth values, lists, and numbers that are not finite or too large are texts, as JSON has them.
    Entries that are null, or have a long name, are left out.
    """
    return dict(islice(_entries(config, ""), MAX_ENTRIES))


def _entries(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float | str]]:
    for key, value in config.items():
        name = f"{prefix}{_storable(key)}"
        if len(name) > LONGEST_TEXT or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _entries(value, f"{name}/")
        elif isinstance(value, str):
            yield name, _short(value)
        elif type(value) in (int, float) and math.isfinite(value) and abs(value) < _EXACT:
            yield name, value
        elif isinstance(value, list):
            yield name, _short(json.dumps(value, ensure_ascii=False))
        else:
            yield name, _short(json.dumps(value))


def _short(text: str) -> str:
    text = _storable(text[: LONGEST_TEXT + 1])
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


def _storable(text: str) -> str:
    """Replace NUL and lone surrogates, which no database has in text."""
    whole = text.encode("utf-8", "replace").decode()
    return whole.replace("\0", "\N{REPLACEMENT CHARACTER}")
