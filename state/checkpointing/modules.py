"""Conversion of modules to trees of their trainable state, and back. Imports JAX.

A module of Flax NNX may hold a Variable in two places; it is stored once, and is one again in the
restored module. An Equinox module holds functions and flags beside its arrays: these are not
stored, and a restore takes them from the target.
"""

import sys
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import jax

from cairn.state.checkpointing.trees import flatten, holds, is_variable
from cairn.storage.errors import UnsupportedFormatError

__all__ = ["FlatTrees", "OpenedItems", "TreePlan", "as_items", "open_modules"]

_SINGLE_ITEM: Final = "state"
"""Name of the item if the caller gives a single tree."""


class OpenedItems(NamedTuple):
    """Trees by name without modules, and the way back.

    Attributes:
        trees: what is stored.
        close: rebuilds the original objects from such trees with other leaves.
    """

    trees: dict[str, Any]
    close: Callable[[Mapping[str, Any]], Any]


def as_items(tree: Any) -> OpenedItems:
    """Return the argument of a save as trees by name; a single tree is called "state".

    A mapping of trees is trees by name, such as Linen's variables and
    `{"model": ..., "optimizer": ...}`. A module, an `nnx.State`, a dataclass, and a mapping with an
    array or a number right in it are a single tree.

    Raises:
        UnsupportedFormatError: an array, a number or a text alone, or None.
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
    """Replace the modules in trees by their state; trees without modules stay unchanged.

    A Variable that several modules share, also across items, is stored in its first place.
    """
    variables, rest = _nnx_kinds(), _equinox_kinds()
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
    """Leaves by path, by item: trees that need no traversal."""


class TreePlan:
    """Cache of the paths of the last save's trees, valid while their structure is equal.

    A job saves equal trees again and again. Traversing them in Python, and looking for modules,
    takes longer than holding their leaves, while JAX compares structures quickly. Equal keys such
    as 1 and True are the same to this comparison, as in a compiled function.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, dict[str, tuple[str, ...]]] = (None, {})

    def flatten(self, items: Any) -> dict[str, dict[str, Any]]:
        """Return the leaves by path, by item, as `trees.flatten` does for what is stored.

        Args:
            items: the items of a save, see `as_items`.

        Raises:
            UnsupportedFormatError: this is no tree.
            UnsupportedLeafError: keys that can't be stored.
        """
        if isinstance(items, FlatTrees):
            return {name: dict(items[name]) for name in sorted(items)}
        trees = as_items(items).trees
        names = sorted(trees, key=str)
        leaves, structure = jax.tree.flatten([trees[name] for name in names])
        before, paths = self._last
        if names == [*paths] and _is_same(structure, before) and not _any_module(leaves):
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
    """Return the modules' states, each Variable in the first that holds it, and the way back."""
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
    stored = [_is_stored(leaf) for leaf in leaves]
    tree = jax.tree.unflatten(
        structure, [leaf if keep else None for leaf, keep in zip(leaves, stored, strict=True)]
    )

    def close(filled: Any) -> Any:
        filled_leaves = structure.flatten_up_to(filled)
        pairs = zip(filled_leaves, leaves, stored, strict=True)
        return jax.tree.unflatten(structure, [new if keep else old for new, old, keep in pairs])

    return tree, close


def _is_stored(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)


def _is_leaf(node: Any) -> bool:
    if isinstance(node, _nnx_kinds() + _equinox_kinds()):
        return False
    return is_variable(node) or bool(jax.tree_util.all_leaves([node]))


def _nnx_kinds() -> tuple[type, ...]:
    """Return the classes of NNX modules, optimizers and metrics; empty if NNX is not imported."""
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Pytree, nnx.Module)


def _equinox_kinds() -> tuple[type, ...]:
    equinox = sys.modules.get("equinox")
    return () if equinox is None else (equinox.Module,)


def _any_module(leaves: list[Any]) -> bool:
    """Return True if a leaf is a module, which JAX treats as a leaf if `pytree=False`."""
    return any(issubclass(kind, _nnx_kinds()) for kind in {*map(type, leaves)})


def _is_same(structure: Any, before: Any) -> bool:
    """Return True if two structures are equal, as far as their static data can be compared."""
    try:
        return before is not None and bool(structure == before)
    except Exception:  # from a comparison in a foreign node's data
        return False
