"""Split of Equinox modules into parameters and static leaves.

The leaves of such a module may also be functions, flags or numbers, which an optimizer can't change
and JAX can't trace. So the module is split: its floating arrays are the parameters, in a module of
the same class with None for all other leaves. The other leaves are static, and are put back when
the module is called.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cairn.counts import count_text
from cairn.interop.errors import ArgumentError

__all__ = ["ModuleCall", "check_leaves", "is_equinox", "take_apart"]


@dataclass(frozen=True)
class ModuleCall:
    """Function from parameters and arguments to the outputs of a module.

    It has the module's static leaves. Those of equal modules are equal and have the same hash, so
    that a compiled step serves both.

    Attributes:
        structure: tree structure of the whole module.
        static: (position among the leaves, leaf) of each static leaf.
        function: function that is called with the whole module and the arguments; None to call
            the module itself.
    """

    structure: Any
    static: tuple[tuple[int, Any], ...]
    function: Callable[..., Any] | None = None

    def merge(self, params: Any) -> Any:
        """Return the whole module with these parameters."""
        leaves = list(self.structure.flatten_up_to(params))
        for position, leaf in self.static:
            leaves[position] = leaf
        return jax.tree.unflatten(self.structure, leaves)

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the module with these parameters."""
        module = self.merge(params)
        if self.function is not None:
            return self.function(module, *args, **kwargs)
        return module(*args, **kwargs)


def is_equinox(tree: Any) -> bool:
    """Return whether a tree is an Equinox module; False if Equinox is not imported."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(tree, equinox.Module)


def take_apart(module: Any, function: Callable[..., Any] | None) -> tuple[Any, ModuleCall]:
    """Return the module with only its parameters, and the function that calls the whole module.

    Args:
        module: the module.
        function: see `ModuleCall.function`.

    Raises:
        ArgumentError: if the module has arrays that are not floating, which would be neither
            trained nor saved, or static leaves that can't be hashed; lists all of them.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(module)
    problems = []
    params: list[Any] = []
    static: list[tuple[int, Any]] = []
    for position, (keys, leaf) in enumerate(named):
        if _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            params.append(leaf)
            continue
        params.append(None)
        static.append((position, leaf))
        if _is_array(leaf):
            problems.append(f"{jax.tree_util.keystr(keys)}: an array of {leaf.dtype}")
        elif not _is_hashable(leaf):
            problems.append(f"{jax.tree_util.keystr(keys)}: {type(leaf).__name__} has no hash")
    if problems:
        raise ArgumentError(
            count_text(
                len(problems),
                "leaf is neither parameter nor static",
                "leaves are neither parameters nor static",
            ),
            path=f"params: {type(module).__name__}",
            expected="floating arrays, and other leaves that can be hashed",
            next_step="keep such leaves in a field of your own TrainState subclass "
            "(equinox.partition takes them out)",
            problems=problems,
        )
    return jax.tree.unflatten(structure, params), ModuleCall(structure, tuple(static), function)


def check_leaves(params: Any) -> None:
    """Check that every leaf of the parameters is an array or a number.

    Raises:
        ArgumentError: if leaves are neither; lists all of them.
    """
    strange = [
        f"params{jax.tree_util.keystr(keys)}: {type(leaf).__name__}"
        for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        if not _is_array(leaf) and not isinstance(leaf, bool | int | float | complex)
    ]
    if strange:
        raise ArgumentError(
            count_text(len(strange), "leaf is no array", "leaves are no arrays"),
            path="params",
            expected="a tree of arrays",
            next_step="pass the arrays alone, and let apply_fn hold the rest",
            problems=strange,
        )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
