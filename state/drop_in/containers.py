"""Containers of a tree as JSON, by which a tree is rebuilt without a target. Imports JAX.

A step stores leaves by path. It does not store which containers are lists, which are empty, and the
types of Python numbers; the manager stores these as JSON. As with Orbax, tuples are restored as
lists, and all other containers as dicts.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from cairn.state.checkpointing.trees import child_nodes, is_variable, nest
from cairn.storage.arrays.leaf_paths import keys_of, path_of

__all__ = ["Containers", "is_empty"]

_NUMBERS: Final[Mapping[str, Any]] = {"bool": False, "int": 0, "float": 0.0, "complex": 0j}
_EMPTIES: Final[Mapping[str, Callable[[], Any]]] = {
    "None": lambda: None,
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
}
_SCALARS: Final = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


def is_empty(node: Any) -> bool:
    """Return True for None and empty containers: Orbax stores no leaf for them."""
    return node is None or (isinstance(node, Mapping | list | tuple) and not node)


class Containers(NamedTuple):
    """Properties of a tree that the paths of its leaves do not show.

    Attributes:
        lists: paths of lists and tuples.
        empties: kind of None or of an empty container, by path.
        numbers: type of a Python number, by path.
    """

    lists: list[str]
    empties: dict[str, str]
    numbers: dict[str, str]

    @classmethod
    def of(cls, tree: Any) -> Self:
        """Return the containers of a tree without modules, or of an item's metadata tree."""
        containers = cls([], {}, {})
        leaves: set[type] = set()

        def visit(node: Any, path: str) -> None:
            kind = type(node)
            if kind in leaves:
                return
            if kind.__name__ in _NUMBERS and kind.__module__ == "builtins":
                containers.numbers[path] = kind.__name__
            elif isinstance(node, ocp.metadata.value.ScalarMetadata):
                containers.numbers[path] = _SCALARS.get(np.dtype(node.dtype).kind, "float")
            elif is_empty(node):
                containers.empties[path] = _kind_of_empty(node)
            elif is_variable(node) or jax.tree_util.all_leaves([node]):
                leaves.add(kind)
            else:
                if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
                    containers.lists.append(path)
                for key, child in child_nodes(node):
                    if type(child) not in leaves:
                        visit(child, f"{path}/{path_of((key,))}" if path else path_of((key,)))

        visit(tree, "")
        return containers

    def to_json(self) -> dict[str, Any]:
        """Return the containers as JSON, for `from_json`; empty for a tree of dicts and arrays."""
        return {name: part for name, part in self._asdict().items() if part}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Return the containers from their JSON; {}, as in older steps, means plain dicts only."""
        return cls(stored.get("lists", []), stored.get("empties", {}), stored.get("numbers", {}))

    def numbers_in(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Return, by path, a zero of the right type for each leaf that was a Python number."""
        return {path: _NUMBERS[kind] for path, kind in self.numbers.items() if path in leaves}

    def nest(self, leaves: Mapping[str, Any]) -> Any:
        """Return the tree with these leaves, given by path: all leaves that the tree has."""
        empties = {path: _EMPTIES[kind]() for path, kind in self.empties.items()}
        if "" in empties:
            return empties[""]
        tree: Any = {"": nest({**leaves, **empties})}
        for path in sorted(self.lists, key=lambda path: len(keys_of(path)), reverse=True):
            *outer, last = ("", *keys_of(path))
            parent = tree
            for key in outer:
                parent = parent.get(key, {})
            children = parent.get(last)
            if isinstance(children, dict):
                # By what is there: a forged position would ask for a list as long.
                parent[last] = [children[key] for key in sorted(children, key=int)]
        return tree[""]


def _kind_of_empty(node: Any) -> str:
    if isinstance(node, Mapping):
        return "Dict"
    if isinstance(node, list):
        return "List"
    return "None" if node is None or hasattr(node, "_fields") else "Tuple"
