"""Lineage graph of a run in columns: ancestors on the left, forks and exports on the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_NODE: Final = (184, 44)
_GAP: Final = (64, 16)
_MARGIN: Final = 2
_LETTERS: Final = 24


@dataclass(frozen=True)
class Node:
    """Node of the graph.

    Attributes:
        name: Name in the node.
        note: Text below the name.
        href: Address that the node links to; None for no link.
        here: True for the run that the page is about.
        kind: Kind of a node that is not a run: "export", "aside" or "adopted".
    """

    name: str
    note: str
    href: str | None
    here: bool = False
    kind: str = ""

    @property
    def short(self) -> str:
        """Name, cut to the width of the node."""
        return self.name if len(self.name) <= _LETTERS else self.name[: _LETTERS - 1] + "…"


@dataclass(frozen=True)
class PlacedNode:
    """Node, and the position of its upper left corner."""

    node: Node
    x: int
    y: int


@dataclass(frozen=True)
class Family:
    """Drawing: nodes, and the curves between them as SVG paths."""

    nodes: tuple[PlacedNode, ...]
    edges: tuple[str, ...]
    width: int
    height: int
    node_width: int = _NODE[0]
    node_height: int = _NODE[1]


def family(before: Sequence[Node], here: Node, after: Sequence[Node]) -> Family:
    """Draw a run with the chain of its ancestors, and the nodes made from it.

    Args:
        before: Ancestors, the nearest first.
        here: The run that the graph is about.
        after: Nodes made from `here`.
    """
    rows = max(1, len(after))
    height = rows * _NODE[1] + (rows - 1) * _GAP[1] + 2 * _MARGIN
    middle = (height - _NODE[1]) // 2
    chain = [*reversed(before), here]
    placed = [PlacedNode(node, _column(at), middle) for at, node in enumerate(chain)]
    ends = [
        PlacedNode(node, _column(len(chain)), _MARGIN + at * (_NODE[1] + _GAP[1]))
        for at, node in enumerate(after)
    ]
    edges = [_edge(node, other) for node, other in pairwise(placed)]
    edges += [_edge(placed[-1], end) for end in ends]
    nodes = (*placed, *ends)
    width = max(node.x for node in nodes) + _NODE[0] + _MARGIN
    return Family(nodes, tuple(edges), width, height)


def _column(at: int) -> int:
    return _MARGIN + at * (_NODE[0] + _GAP[0])


def _edge(node: PlacedNode, other: PlacedNode) -> str:
    x, y = node.x + _NODE[0], node.y + _NODE[1] // 2
    to_x, to_y = other.x, other.y + _NODE[1] // 2
    half = (to_x - x) // 2
    return f"M{x} {y}C{x + half} {y} {to_x - half} {to_y} {to_x} {to_y}"
