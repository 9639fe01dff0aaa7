"""Conversion of modules to trees of the state that is stored, and back. Imports JAX.

A Flax NNX module may hold one Variable in two places: it is stored once, and the restored module
has it in both places. An Equinox module holds functions and flags beside its arrays: these are not
stored, and a restore takes them from the target.
"""

import sys
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import jax

from cairn.state.checkpointing.trees import flatten, holds, is_variable
from cairn.storage.errors import UnsupportedFormatError

__all__ = [
    "FlatTrees",
    "OpenedItems",
    "TreePlan",
    "any_module",
    "as_items",
    "nnx_kinds",
    "open_modules",
]

_SINGLE_ITEM: Final = "state"
"""Name of the item if the caller gives a single tree."""


class OpenedItems(NamedTuple):
    """Result of a conversion of objects to trees: the trees, and a function that reverses it.

    Attributes:
        trees: the trees, by name of the item.
        close: function that rebuilds the original objects from such trees with other leaves.
    """

    trees: dict[str, Any]
    close: Callable[[Mapping[str, Any]], Any]


def as_items(tree: Any) -> OpenedItems:
    """Return the argument of a save as trees by name; a single tree gets the name "state".

    A mapping whose values are all trees gives their names, such as `{"model": ..., "optimizer":
    ...}` or Linen's variables. A module, an `nnx.State`, a dataclass, and a mapping that has an
    array or a number as a value are a single tree.

    Raises:
        UnsupportedFormatError: the argument is None, or a single array, number or text.
    """
    if tree is None or _is_leaf(tree):
        raise UnsupportedFormatError(
            "this is no tree",
            path="items",
            expected='trees by name, such as {"model": params}, or one tree',
            found=f"{type(tree).__name__}",
            next_step="Give it a name: {'value': ...}.",
        )
    nnx = sys.modules.get("flax.nnx")
    one_tree = not isinstance(tree, Mapping) or (nnx is not None and isinstance(tree, nnx.State))
    if one_tree or any(map(_is_leaf, tree.values())):
        return OpenedItems({_SINGLE_ITEM: tree}, lambda items: items[_SINGLE_ITEM])
    if type(tree) is dict:
        return OpenedItems(dict(tree), dict)
    # Not `tree[name]`: a FrozenDict wraps each inner dict in a new FrozenDict.
    children, structure = jax.tree.flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    named = {key.key: child for (key,), child in children}
    return OpenedItems(
        named, lambda items: jax.tree.unflatten(structure, [items[name] for name in named])
    )


def open_modules(items: Mapping[str, Any]) -> OpenedItems:
    """Return the trees with their modules replaced by their states.

    A Variable that several modules share, also across items, appears only in the first of them.
    """
    variables, rest = nnx_kinds(), _equinox_kinds()
    kinds = variables + rest
    if not kinds or not holds(items, kinds):
        return OpenedItems(dict(items), dict)
    structure: Any
    nodes, structure = jax.tree.flatten(dict(items), is_leaf=lambda node: isinstance(node, kinds))
    shared = [number for number, node in enumerate(nodes) if isinstance(node, variables)]
    opened = list(nodes)
    closes: dict[int, Callable[[Any], Any]] = {}
    for number, node in enumerate(nodes):
        if isinstance(node, rest):
            opened[number], closes[number] = _open_equinox(node)
    merge: Callable[[list[Any]], list[Any]] = list
    if shared:
        states, merge = _open_nnx([nodes[number] for number in shared])
        for number, state in zip(shared, states, strict=True):
            opened[number] = state

    def close(filled: Mapping[str, Any]) -> dict[str, Any]:
        closed_nodes: list[Any] = structure.flatten_up_to(dict(filled))
        for number, shut in closes.items():
            closed_nodes[number] = shut(closed_nodes[number])
        for number, module in zip(
            shared, merge([closed_nodes[position] for position in shared]), strict=True
        ):
            closed_nodes[number] = module
        closed: dict[str, Any] = jax.tree.unflatten(structure, closed_nodes)
        return closed

    return OpenedItems(jax.tree.unflatten(structure, opened), close)


class FlatTrees(dict[str, dict[str, Any]]):
    """Trees of a save that are flat already: item -> path -> leaf."""


class TreePlan:
    """Cache of the paths of the last save's trees, valid while their structure is equal.

    A job saves trees of equal structure again and again. Traversing them in Python in search of
    modules takes longer than staging their leaves; comparing their structures in JAX is fast. The
    comparison does not distinguish equal keys such as 1 and True, nor does `jax.jit`.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, dict[str, tuple[str, ...]]] = (None, {})

    def flatten(self, items: Any) -> dict[str, dict[str, Any]]:
        """Return the leaves to store: item -> path -> leaf, with modules replaced by their states.

        Args:
            items: the items of a save, see `as_items`, or `FlatTrees`.

        Raises:
            UnsupportedFormatError: `items` is neither a tree nor a mapping of trees.
            UnsupportedLeafError: trees have keys that can't be stored.
        """
        if isinstance(items, FlatTrees):
            return {name: dict(items[name]) for name in sorted(items)}
        trees = as_items(items).trees
        names = sorted(trees, key=str)
        leaves, structure = jax.tree.flatten([trees[name] for name in names])
        before, paths = self._last
        if names == [*paths] and _is_same(structure, before) and not any_module(leaves):
            left = iter(leaves)
            return {
                name: dict(zip(own, islice(left, len(own)), strict=True))
                for name, own in paths.items()
            }
        opened = open_modules(trees).trees
        flat = {name: flatten(opened[name]) for name in names}
        planned = all(opened[name] is trees[name] for name in names)
        self._last = (
            (structure, {name: tuple(own) for name, own in flat.items()}) if planned else (None, {})
        )
        return flat


def _open_nnx(modules: list[Any]) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    """Return the modules' states, and a function from such states to modules.

    A Variable that several modules share is in the state of the first of them.
    """
    nnx = sys.modules["flax.nnx"]
    graph, state = nnx.split(modules)
    states = [state.get(number, {}) for number in range(len(modules))]

    def merge(filled: list[Any]) -> list[Any]:
        whole = nnx.State({n: node for n, node in enumerate(filled) if n in state})
        merged: list[Any] = nnx.merge(graph, whole)
        return merged

    return states, merge


def _open_equinox(module: Any) -> tuple[Any, Callable[[Any], Any]]:
    structure: Any
    leaves, structure = jax.tree.flatten(module)
    stored = [hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for leaf in leaves]
    tree = jax.tree.unflatten(
        structure, [leaf if keep else None for leaf, keep in zip(leaves, stored, strict=True)]
    )

    def close(filled: Any) -> Any:
        filled_leaves = structure.flatten_up_to(filled)
        pairs = zip(filled_leaves, leaves, stored, strict=True)
        return jax.tree.unflatten(structure, [new if keep else old for new, old, keep in pairs])

    return tree, close


def _is_leaf(node: Any) -> bool:
    if isinstance(node, nnx_kinds() + _equinox_kinds()):
        return False
    return is_variable(node) or bool(jax.tree_util.all_leaves([node]))


def nnx_kinds() -> tuple[type, ...]:
    """Return the classes of NNX modules, optimizers and metrics; empty if NNX is not imported."""
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Pytree, nnx.Module)


def _equinox_kinds() -> tuple[type, ...]:
    equinox = sys.modules.get("equinox")
    return () if equinox is None else (equinox.Module,)


def any_module(leaves: list[Any]) -> bool:
    """Return True if a leaf is a module, which JAX treats as a leaf if `pytree=False`."""
    return any(issubclass(kind, nnx_kinds()) for kind in {*map(type, leaves)})


def _is_same(structure: Any, before: Any) -> bool:
    """Return True if two structures are equal; False if not, or if comparing them raises."""
    try:
        return before is not None and bool(structure == before)
    except Exception:  # raised when static data of a custom node is compared
        return False
