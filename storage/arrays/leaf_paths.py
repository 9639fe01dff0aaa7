"""Paths of leaves: a tree's keys joined by "/", unambiguously.

A "/" within a key is written "%2F": Haiku's {"linear/~/w": ...} has the path "linear%2F~%2Fw", and
{"linear": {"~": {"w": ...}}} the path "linear/~/w". A "%" is written "%25" only where it would
otherwise begin one of these two escapes. All other keys, also those with a ".", stay unchanged.
"""

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["keys_of", "path_of"]

_NEEDS_ESCAPE: Final = re.compile("%(?=2F|25)")


def path_of(keys: Iterable[str]) -> str:
    """Return the path of the leaf at `keys`."""
    return "/".join(map(_escape, keys))


def keys_of(path: str) -> tuple[str, ...]:
    """Return the keys of a path; the inverse of `path_of`."""
    if not path:
        return ()
    segments = path.split("/")
    if "%" in path:
        # In this order: the other one would make "%2F" of "%252F", and then "/" of that.
        return tuple(part.replace("%2F", "/").replace("%25", "%") for part in segments)
    return tuple(segments)


def _escape(key: str) -> str:
    if "%" in key:
        key = _NEEDS_ESCAPE.sub("%25", key)
    return key.replace("/", "%2F") if "/" in key else key
