"""Tree of a step's leaves, one level at a time, so that a page can show 100,000 leaves."""

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.storage.runs.records.manifest import LeafRecord


@dataclass(frozen=True)
class Branch:
    """Leaf or subtree at a level of the tree.

    Attributes:
        name: Path relative to the level; levels with a single child are joined by `/`.
        prefix: Common prefix of the paths of its leaves.
        leaves: Number of its leaves.
        nbytes: Total bytes of its leaves.
        leaf: The leaf, if the branch is one; None for a subtree.
    """

    name: str
    prefix: str
    leaves: int
    nbytes: int
    leaf: LeafRecord | None = None


def place(leaves: Sequence[LeafRecord], text: str) -> str:
    """Return the prefix of the level that a text names: empty, or with a slash at its end.

    The path of a leaf names the level that the leaf is on.

    Args:
        leaves: Leaves of one item, by path.
        text: Prefix, with or without slashes around it.
    """
    inner = text.strip("/")
    if not inner:
        return ""
    if any(leaf.path == inner for leaf in leaves):
        above, slash, _ = inner.rpartition("/")
        return above + slash
    return f"{inner}/"


def branches(leaves: Sequence[LeafRecord], prefix: str) -> list[Branch]:
    """Return the subtrees and leaves directly below a prefix, in the order of `leaves`.

    Args:
        leaves: Leaves of one item, by path.
        prefix: Prefix of paths that ends with `/`; empty for the root.
    """
    groups: dict[str, list[LeafRecord]] = {}
    for leaf in leaves:
        if leaf.path.startswith(prefix):
            groups.setdefault(leaf.path[len(prefix) :].split("/", 1)[0], []).append(leaf)
    return [_branch(name, prefix, group) for name, group in groups.items()]


def trail(path: str) -> list[tuple[str, str]]:
    """Return the levels above the last slash of a path or prefix, each with the prefix up to it."""
    parts = path.split("/")[:-1]
    return [(part, "/".join(parts[: at + 1]) + "/") for at, part in enumerate(parts)]


def _branch(name: str, prefix: str, group: Sequence[LeafRecord]) -> Branch:
    nbytes = sum(leaf.nbytes for leaf in group)
    if len(group) == 1:
        return Branch(group[0].path[len(prefix) :], group[0].path, 1, nbytes, group[0])
    common = f"{prefix}{name}/"
    while True:  # join levels with a single child: they offer nothing to choose from
        ways = {leaf.path[len(common) :].split("/", 1)[0] for leaf in group}
        if len(ways) > 1 or any("/" not in leaf.path[len(common) :] for leaf in group):
            break
        common += f"{ways.pop()}/"
    return Branch(common[len(prefix) : -1], common, len(group), nbytes)
