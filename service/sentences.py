"""Errors of the packages below as plain sentences, and as members of a problem."""

from typing import Any, Final

from cairn.interop.errors import InteropError
from cairn.storage.errors import StorageError

_ABSENT: Final = ("no such run", "no such step", "no such alias")


def sentence_of(error: StorageError | InteropError, *, root: str = "") -> str:
    """Return what is wrong in one sentence; the error's `next_step` says what to do.

    Args:
        error: Error that was raised.
        root: Name of the root where it was, if the reader knows roots.
    """
    run = str(error.path).rpartition("/")[2]
    found = "" if error.found in ("", "nothing", "none") else f" ({error.found})"
    if error.message == "no such run":
        place = f'in root "{root}"' if root else f"at {error.path}"
        return f'There is no run "{run}" {place}{found}.'
    if error.message in _ABSENT:
        return f'There is no {error.expected} in run "{run}"{found}.'
    return _sentence(error.message)


def detail_of(error: StorageError | InteropError, *, root: str = "") -> str:
    """Return the whole error as text: a plain sentence if that has all of it, else its message."""
    if error.message in _ABSENT:
        return f"{sentence_of(error, root=root)} {_next_step(error, root)}".rstrip()
    return str(error)


def members_of(error: StorageError | InteropError, *, root: str = "") -> dict[str, Any]:
    """Return the parts that an error has, by their names in a problem (RFC 9457, section 3.2)."""
    parts: dict[str, Any] = {
        "message": sentence_of(error, root=root),
        **{
            name: str(part)
            for name in ("path", "expected", "found")
            if (part := getattr(error, name)) is not None
        },
        "next_step": _sentence(_next_step(error, root)),
        "problems": list(error.problems),
    }
    return {name: part for name, part in parts.items() if part}


def _next_step(error: StorageError | InteropError, root: str) -> str:
    """Return what to do next; a reader who knows roots gets names, not addresses in the store."""
    folder = str(error.path).rpartition("/")[0]
    text = error.next_step or ""
    return text.replace(f" {folder}/", " ") if root and error.message == _ABSENT[0] else text


def _sentence(text: str) -> str:
    """Begin a text with a capital, and end it with a period if it has no end."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?')) else '.'}" if text else ""
