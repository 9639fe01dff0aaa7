"""Paths of leaves: a tree's keys joined by "/", so that no two trees share one. Pure.

A key is a segment of the path as it is, unless it holds a "/": that is written "%2F" in it, so that
Haiku's {"linear/~/w": ...} has the path "linear%2F~%2Fw", and {"linear": {"~": {"w": ...}}} the
path "linear/~/w". A "%" is written "%25", but only where what follows would else read as one of
these two. All other keys, those with "." among them, stand for themselves.
"""

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["keys_of", "path_of"]

_MISLEADING: Final = re.compile("%(?=2F|25)")
_WRITTEN: Final = re.compile("%2F|%25")


def path_of(keys: Iterable[str]) -> str:
    """The path of the leaf that `keys` lead to."""
    return "/".join(map(_segment, keys))


def keys_of(path: str) -> tuple[str, ...]:
    """The keys that `path_of` made this path from."""
    if not path:
        return ()
    segments = path.split("/")
    if "%" in path:
        return tuple(_WRITTEN.sub(_plain, segment) for segment in segments)
    return tuple(segments)


def _segment(key: str) -> str:
    if "%" in key:
        key = _MISLEADING.sub("%25", key)
    return key.replace("/", "%2F") if "/" in key else key


def _plain(found: re.Match[str]) -> str:
    return "/" if found[0] == "%2F" else "%"
