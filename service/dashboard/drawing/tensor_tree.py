"""The leaves of a step as a tree, one level at a time: of a step of 100,000 leaves, too."""

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.storage.runs import LeafRecord


@dataclass(frozen=True)
class Branch:
    """What lies at one place of the tree.

    Attributes:
        name: From the place that is shown on; joined by `/` where there is only one way.
        prefix: Of the paths of all its leaves.
        leaves: How many it has.
        nbytes: Of them together.
        leaf: If it is a leaf itself.
    """

    name: str
    prefix: str
    leaves: int
    nbytes: int
    leaf: LeafRecord | None = None


def place(leaves: Sequence[LeafRecord], text: str) -> str:
    """The prefix of the place in the tree that a text means: with a slash at its end, or empty.

    Of a leaf's own path it is the level that the leaf is on.

    Args:
        leaves: Of one item, by path.
        text: A prefix, with slashes around it or without.
    """
    inner = text.strip("/")
    if not inner:
        return ""
    if any(leaf.path == inner for leaf in leaves):
        above, slash, _ = inner.rpartition("/")
        return above + slash
    return f"{inner}/"


def branches(leaves: Sequence[LeafRecord], prefix: str) -> list[Branch]:
    """What lies below a prefix: branches and leaves by name.

    Args:
        leaves: Of one item, by path.
        prefix: Of paths, up to a `/`; empty: from the root on.
    """
    groups: dict[str, list[LeafRecord]] = {}
    for leaf in leaves:
        if leaf.path.startswith(prefix):
            groups.setdefault(leaf.path[len(prefix) :].split("/", 1)[0], []).append(leaf)
    return [_branch(name, prefix, group) for name, group in groups.items()]


def _branch(name: str, prefix: str, group: Sequence[LeafRecord]) -> Branch:
    nbytes = sum(one.nbytes for one in group)
    if len(group) == 1:
        return Branch(group[0].path[len(prefix) :], group[0].path, 1, nbytes, group[0])
    common = f"{prefix}{name}/"
    while True:  # a level with one way only is no choice
        ways = {one.path[len(common) :].split("/", 1)[0] for one in group}
        if len(ways) > 1 or any("/" not in one.path[len(common) :] for one in group):
            break
        common += f"{ways.pop()}/"
    return Branch(common[len(prefix) : -1], common, len(group), nbytes)
