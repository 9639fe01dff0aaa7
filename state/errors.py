"""Every error that `state` raises beside those of `interop`.

StateError                 (InteropError)
├── ShardingError          (ValueError)      leaves or heads that a mesh axis does not divide
├── NotInitializedError    (AssertionError, ValueError)  the optimizer state is not there yet
├── TreeStructureError     (ValueError)      a tree that does not fit the state; all problems listed
├── OptimizerError         (ValueError)      an optimizer that cannot be described or rebuilt
└── OptimizerNotFoundError (FileNotFoundError)  a checkpoint that holds no optimizer state
"""

from typing import Any

from cairn.interop.errors import InteropError

__all__ = [
    "NotInitializedError",
    "OptimizerError",
    "OptimizerNotFoundError",
    "ShardingError",
    "StateError",
    "TreeStructureError",
    "require_optimizer",
]


class StateError(InteropError):
    """Base of the errors that only `state` raises."""


class ShardingError(StateError, ValueError):
    """Leaves that cannot be placed on a mesh; `problems` lists every one."""


class NotInitializedError(StateError, AssertionError, ValueError):
    """Something is missing that an earlier call should have made, such as the optimizer state."""


class TreeStructureError(StateError, ValueError):
    """A tree that does not fit the state; `problems` lists every leaf that differs."""


class OptimizerError(StateError, ValueError):
    """An optimizer that cannot be described as JSON, or rebuilt from it."""


class OptimizerNotFoundError(StateError, FileNotFoundError):
    """A checkpoint that holds no optimizer state."""


def require_optimizer(tx: Any, opt_state: Any, *, path: str, next_step: str) -> None:
    """Check that a state has what a training step needs: an optimizer and its state.

    Args:
        tx: the state's optimizer, or None.
        opt_state: the optimizer's state, or None.
        path: name of the caller's function, for the error.
        next_step: advice for the error.

    Raises:
        NotInitializedError: if one of them is None; says which.
    """
    if tx is None or opt_state is None:
        raise NotInitializedError(
            path=path,
            expected="an optimizer and its state",
            found=f"tx={'None' if tx is None else 'set'}, "
            f"opt_state={'None' if opt_state is None else 'set'}",
            next_step=next_step,
        )
