"""Containers of a tree as JSON, by which a tree is rebuilt without a target. Imports JAX.

A step stores leaves by path. It does not store which containers are lists, which are empty, and the
types of Python numbers; the manager stores these as JSON. As with Orbax, tuples are restored as
lists, and all other containers as dicts.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from pydantic import ConfigDict
from typing_extensions import TypedDict

from cairn.state.checkpointing.trees import child_nodes, is_variable, nest
from cairn.storage.arrays.leaf_paths import keys_of, path_of
from cairn.storage.errors import CorruptionError

__all__ = ["Containers", "ContainersJson", "is_empty"]

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


class ContainersJson(TypedDict, total=False):
    """Stored form of `Containers`."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    lists: list[str]
    empties: dict[str, Literal["None", "Dict", "List", "Tuple"]]
    numbers: dict[str, Literal["bool", "int", "float", "complex"]]


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
        """Return the tree with these leaves, given by path: all leaves that the tree has.

        Raises:
            CorruptionError: a container lies at or below a leaf, or a list has the keys of a dict.
        """
        tree: Any = {"": nest(leaves)}
        for path, kind in self.empties.items():
            folder, key = _slot(tree, path)
            present = folder.get(key, {})
            if not isinstance(present, dict) or present:
                raise _misfit(path)
            folder[key] = _EMPTIES[kind]()
        for path in sorted(self.lists, key=lambda path: len(keys_of(path)), reverse=True):
            folder, key = _slot(tree, path)
            children = folder.get(key, {})
            if not isinstance(children, dict):
                raise _misfit(path)
            positions = [str(position) for position in range(len(children))]
            if children.keys() != {*positions}:
                raise _misfit(path)
            if positions:
                folder[key] = [children[position] for position in positions]
        return tree[""]


def _slot(tree: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the dict that a node lies in, and its key there; dicts that are missing are added."""
    *outer, last = ("", *keys_of(path))
    folder = tree
    for key in outer:
        folder = folder.setdefault(key, {})
        if not isinstance(folder, dict):
            raise _misfit(path)
    return folder, last


def _misfit(path: str) -> CorruptionError:
    return CorruptionError(
        "the stored containers do not fit the leaves",
        path=path,
        expected="a container above leaves, or where no leaf is",
        found="a leaf, or keys that are no positions of a list",
        next_step="Load another step, or restore the file `meta` from a backup.",
    )


def _kind_of_empty(node: Any) -> str:
    if isinstance(node, Mapping):
        return "Dict"
    if isinstance(node, list):
        return "List"
    return "None" if node is None or hasattr(node, "_fields") else "Tuple"
