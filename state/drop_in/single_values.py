"""Items that are a single value: an array, a JAX random key, or the state of NumPy's generator.

An array or a key is stored as a tree with one leaf, NumPy's state as JSON.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from cairn.storage.errors import CorruptionError

__all__ = [
    "RESTORE_ARGS",
    "SAVE_ARGS",
    "VALUE",
    "SingleValue",
    "as_json",
    "as_tree_args",
    "from_json",
    "kind_of",
    "problem_of",
]

SingleValue = Literal["array", "jax key", "numpy state"]
VALUE: Final = "value"
"""Path of the leaf in the tree of an array or a key."""

SAVE_ARGS: Final[Mapping[type, SingleValue]] = {
    ocp.args.ArraySave: "array",
    ocp.args.JaxRandomKeySave: "jax key",
    ocp.args.NumpyRandomKeySave: "numpy state",
}
RESTORE_ARGS: Final[Mapping[SingleValue, type[Any]]] = {
    "array": ocp.args.ArrayRestore,
    "jax key": ocp.args.JaxRandomKeyRestore,
    "numpy state": ocp.args.NumpyRandomKeyRestore,
}


def kind_of(item_args: Any) -> SingleValue | None:
    """Return the kind of single value that arguments of a save are for; None for other items."""
    return SAVE_ARGS.get(type(item_args))


def problem_of(kind: SingleValue, item: Any) -> str:
    """Return what is wrong with a single value; "" if nothing. Arrays are checked elsewhere."""
    if kind == "jax key" and not isinstance(item, jax.Array):
        return f"{type(item).__name__} is no key of JAX"
    if kind == "numpy state" and not isinstance(item, tuple | dict):
        return f"{type(item).__name__} is no state of NumPy's generator"
    return ""


def as_tree_args(item_args: Any) -> Any:
    """Return the arguments that restore the tree of an array or a key; None if none are needed."""
    restore_args = None if item_args is None else item_args.restore_args
    return (
        None if restore_args is None else ocp.args.PyTreeRestore(restore_args={VALUE: restore_args})
    )


def as_json(state: Any) -> Any:
    """Return the state of NumPy's generator as JSON; the inverse of `from_json`."""
    match state:
        case np.ndarray():
            return {"array": state.tolist(), "dtype": state.dtype.name}
        case np.generic():
            return state.item()
        case tuple():
            return [as_json(part) for part in state]
        case dict():
            return {name: as_json(part) for name, part in state.items()}
        case _:
            return state


def from_json(stored: Any) -> Any:
    """Return the state of NumPy's generator from its JSON; the inverse of `as_json`.

    Raises:
        CorruptionError: an array's values are not of its dtype.
    """
    match stored:
        case {"array": values, "dtype": dtype}:
            try:
                return np.array(values, dtype)
            except (TypeError, ValueError, OverflowError) as exc:
                raise CorruptionError(
                    "the stored state of NumPy's generator is damaged",
                    path=VALUE,
                    expected=f"integers of the dtype {str(dtype)[:100]!r}",
                    found=str(exc)[:200],
                    next_step="Load another step, or restore the file `meta` from a backup.",
                ) from exc
        case list():
            return tuple(map(from_json, stored))
        case dict():
            return {name: from_json(part) for name, part in stored.items()}
        case _:
            return stored
