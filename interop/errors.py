"""Every error that `interop` raises.

InteropError
├── ArgumentError          (ValueError)      an argument without effect, or in conflict with another
├── ConfigError            (ValueError)      a model config that is unknown or inconsistent
├── ConversionError        (ValueError)      weights that do not fit a rule table; all listed
├── UnknownModelError      (ValueError)      a stored model class that is not defined here
└── StateError             of `cairn.state`, which stands on `interop`
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

__all__ = [
    "ArgumentError",
    "ConfigError",
    "ConversionError",
    "InteropError",
    "UnknownModelError",
    "require_known",
    "with_nearest",
]


class InteropError(Exception):
    """Base of every error of `interop` and `state`: path, expected, found and next step."""

    def __init__(
        self,
        message: str | None = None,
        *,
        path: object = None,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
        problems: Sequence[str] = (),
    ) -> None:
        self.message = message or ""
        self.path = path
        self.expected = expected
        self.found = found
        self.next_step = next_step
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(_compose(message, path, expected, found, next_step, self.problems))


def _compose(
    message: str | None,
    path: object,
    expected: object,
    found: object,
    next_step: str | None,
    problems: Sequence[str],
) -> str:
    parts = [message] if message is not None else []
    if expected is not None:
        parts.append(f"expected {expected}")
    if found is not None:
        parts.append(f"found {found}")
    if next_step is not None:
        parts.append(next_step)
    text = "; ".join(parts)
    if path is not None:
        text = f"{path}: {text}"
    return "\n".join([text, *(f"  - {problem}" for problem in problems)])


class ArgumentError(InteropError, ValueError):
    """An argument that is invalid, has no effect in this call, or contradicts another."""


class ConfigError(InteropError, ValueError):
    """A model config that is unknown, incomplete or inconsistent."""


class ConversionError(InteropError, ValueError):
    """Weights that don't fit a rule table; `problems` lists every mismatch."""


class UnknownModelError(InteropError, ValueError):
    """A checkpoint of a model class that this process has not defined."""


def with_nearest(name: str, names: Iterable[str]) -> str:
    """Return an unknown name for a message, followed by the most similar known one, if any."""
    nearest = get_close_matches(name, list(names), n=1)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name


def require_known(argument: str, value: Any, names: Sequence[str]) -> None:
    """Raise ArgumentError unless `value` is one of `names`.

    Raises:
        ArgumentError: `value` is none of them; the message names `argument` and lists `names`.
    """
    if value not in names:
        raise ArgumentError(path=argument, expected="one of " + ", ".join(names), found=repr(value))
