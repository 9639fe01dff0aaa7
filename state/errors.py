"""Every error that `state` raises.

StateError
├── ShardingError          (ValueError)      leaves or heads that a mesh axis does not divide
├── NotInitializedError    (AssertionError, ValueError)  the optimizer state is not there yet
├── TreeStructureError     (ValueError)      a tree that does not fit the state; all problems listed
├── ArgumentError          (ValueError)      an argument that cannot act, or contradicts another
├── ConfigError            (ValueError)      a model config that is unknown or inconsistent
├── ConversionError        (ValueError)      weights that do not fit a rule table; all listed
├── UnknownModelError      (ValueError)      a stored model class that is not defined here
├── OptimizerError         (ValueError)      an optimizer that cannot be described or rebuilt
└── OptimizerNotFoundError (FileNotFoundError)  a checkpoint that holds no optimizer state
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

__all__ = [
    "ArgumentError",
    "ConfigError",
    "ConversionError",
    "NotInitializedError",
    "OptimizerError",
    "OptimizerNotFoundError",
    "ShardingError",
    "StateError",
    "TreeStructureError",
    "UnknownModelError",
]


class StateError(Exception):
    """Base of every error of `state`; says where, what was expected and found, and what to do."""

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


class ShardingError(StateError, ValueError):
    """Leaves that cannot be placed on a mesh; `problems` lists every one."""


class NotInitializedError(StateError, AssertionError, ValueError):
    """Something that an earlier call should have made, such as the optimizer state."""


class TreeStructureError(StateError, ValueError):
    """A tree that does not fit the state; `problems` lists every leaf that differs."""


class ArgumentError(StateError, ValueError):
    """An argument that cannot act in this call, or that contradicts another."""


class ConfigError(StateError, ValueError):
    """A model config that is unknown, incomplete or inconsistent."""


class ConversionError(StateError, ValueError):
    """Weights that a rule table does not cover; `problems` lists every one."""


class UnknownModelError(StateError, ValueError):
    """A checkpoint of a model class that this process has not defined."""


class OptimizerError(StateError, ValueError):
    """An optimizer that cannot be described as JSON, or rebuilt from it."""


class OptimizerNotFoundError(StateError, FileNotFoundError):
    """A checkpoint that holds no optimizer state."""


def require_optimizer(tx: Any, opt_state: Any, *, path: str, next_step: str) -> None:
    """Check that a state can take a step.

    Raises:
        NotInitializedError: if it lacks the optimizer or its state; says which.
    """
    if tx is None or opt_state is None:
        raise NotInitializedError(
            path=path,
            expected="an optimizer and its state",
            found=f"tx={'None' if tx is None else 'set'}, "
            f"opt_state={'None' if opt_state is None else 'set'}",
            next_step=next_step,
        )


def with_nearest(name: str, known: Iterable[str]) -> str:
    """Return an unknown name for a message, with the most similar known one, if any."""
    nearest = get_close_matches(name, list(known), n=1)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name


def require_known(argument: str, value: Any, known: Sequence[str]) -> None:
    """Check that a value is among the known ones.

    Raises:
        ArgumentError: if it is not; names the argument and lists the known values.
    """
    if value not in known:
        raise ArgumentError(path=argument, expected="one of " + ", ".join(known), found=repr(value))
