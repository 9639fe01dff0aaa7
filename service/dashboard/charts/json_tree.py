"""Tree of a JSON value for a page, with a bounded number of nodes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MAX_NODES: Final = 1000
MAX_DEPTH: Final = 12
"""Deepest level of the tree; what lies below is shown as its number of entries."""


@dataclass
class Node:
    """Node of the tree.

    Attributes:
        name: Key in the object, or position in the list, that it is in.
        value: Value of a leaf; None for a branch.
        size: Number of entries of a branch; None for a leaf.
        children: Entries that are shown.
    """

    name: str
    value: Any = None
    size: int | None = None
    children: list["Node"] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        """Number of its entries that are not shown."""
        return (self.size or 0) - len(self.children)


def json_tree(value: Mapping[str, Any]) -> Node:
    """Build the tree of a JSON object: level by level, until there are `MAX_NODES` nodes."""
    root = Node("", size=len(value))
    level: list[tuple[Node, Any]] = [(root, value)]
    room = MAX_NODES
    for _ in range(MAX_DEPTH):
        below: list[tuple[Node, Any]] = []
        for node, inner in level:
            entries = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
            for name, entry in entries:
                if not room:
                    return root
                room -= 1
                is_branch = isinstance(entry, Mapping | list) and bool(entry)
                child = Node(str(name), None if is_branch else entry)
                if is_branch:
                    child.size = len(entry)
                    below.append((child, entry))
                node.children.append(child)
        level = below
    return root
