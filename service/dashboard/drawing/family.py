"""A run between what it comes from and what was made of it: a graph of columns."""

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
    """What the graph is of.

    Attributes:
        name: Of it.
        note: What is said below.
        href: Where it leads; None: nowhere.
        here: It is the one that the page is about.
        kind: What it is, if it is no run: "export", "aside" or "adopted".
    """

    name: str
    note: str
    href: str | None
    here: bool = False
    kind: str = ""

    @property
    def short(self) -> str:
        """Its name, as far as there is room."""
        return self.name if len(self.name) <= _LETTERS else self.name[: _LETTERS - 1] + "…"


@dataclass(frozen=True)
class Placed:
    """A node, and where its upper left corner is."""

    node: Node
    x: int
    y: int


@dataclass(frozen=True)
class Family:
    """A drawing: nodes, and curves between them as SVG has them."""

    nodes: tuple[Placed, ...]
    edges: tuple[str, ...]
    width: int
    height: int
    node_width: int = _NODE[0]
    node_height: int = _NODE[1]


def family(before: Sequence[Node], here: Node, after: Sequence[Node]) -> Family:
    """A chain that leads to a node, and what comes of that.

    Args:
        before: The nearest first.
        here: The node.
        after: All from `here`.
    """
    rows = max(1, len(after))
    height = rows * _NODE[1] + (rows - 1) * _GAP[1] + 2 * _MARGIN
    middle = (height - _NODE[1]) // 2
    chain = [*reversed(before), here]
    placed = [Placed(node, _column(at), middle) for at, node in enumerate(chain)]
    ends = [
        Placed(node, _column(len(chain)), _MARGIN + at * (_NODE[1] + _GAP[1]))
        for at, node in enumerate(after)
    ]
    edges = [_edge(one, other) for one, other in pairwise(placed)]
    edges += [_edge(placed[-1], one) for one in ends]
    nodes = (*placed, *ends)
    width = max(one.x for one in nodes) + _NODE[0] + _MARGIN
    return Family(nodes, tuple(edges), width, height)


def _column(at: int) -> int:
    return _MARGIN + at * (_NODE[0] + _GAP[0])


def _edge(one: Placed, other: Placed) -> str:
    x, y = one.x + _NODE[0], one.y + _NODE[1] // 2
    to_x, to_y = other.x, other.y + _NODE[1] // 2
    half = (to_x - x) // 2
    return f"M{x} {y}C{x + half} {y} {to_x - half} {to_y} {to_x} {to_y}"
