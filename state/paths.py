"""Paths of a tree's leaves: the keys joined by "/", as in partition rules and checkpoints.

A "/" within a key is "%2F" in checkpoints (see `cairn.storage.arrays.path_of`), and "/" in rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from cairn.counts import count_text
from cairn.state.checkpointing import trees
from cairn.state.errors import TreeStructureError
from cairn.storage.arrays.leaf_paths import keys_of

__all__ = [
    "NamedLeaf",
    "arrays_among",
    "has_variables",
    "is_variable",
    "leaves_by_item",
    "named_leaves",
    "own_variables",
    "rebuild",
    "too_wide",
    "tree_problems",
    "variable_paths",
]


class NamedLeaf:
    """Leaf of a tree, with its path, and the logical axis names and type of its Variable.

    Attributes:
        path: path of the leaf, as in checkpoints.
        leaf: the leaf.
        axes: logical name of each axis; None without.
        variable_type: class of the leaf's Variable; None without.
    """

    __slots__ = ("axes", "leaf", "path", "variable_type")

    def __init__(
        self, path: str, leaf: Any, axes: tuple[str | None, ...] | None, variable_type: type | None
    ) -> None:
        self.path = path
        self.leaf = leaf
        self.axes = axes
        self.variable_type = variable_type

    @property
    def readable_path(self) -> str:
        """The path for partition rules and people, in which a "/" within a key stays "/"."""
        return "/".join(keys_of(self.path))


def is_variable(node: object) -> bool:
    """Return whether a node is an NNX Variable, the box around one array of a module."""
    return isinstance(node, nnx.Variable)


def has_variables(module: Any, kind: type[Any]) -> bool:
    """Return whether a module has Variables of a class.

    The search uses JAX where possible: it takes a tenth of the time of NNX's.
    """
    leaves = jax.tree.leaves(module, is_leaf=is_variable)
    if any(isinstance(leaf, nnx.Module) for leaf in leaves):  # not pytrees to JAX
        return bool(jax.tree.leaves(nnx.state(module, kind)))
    return any(isinstance(leaf, kind) for leaf in leaves)


def named_leaves(tree: Any) -> list[NamedLeaf]:
    """Return the leaves of a tree in JAX's order, each with its path.

    The leaf of a Variable is its value, at the Variable's path. Its metadata entry `axes` (one
    logical name per dimension) becomes the leaf's `axes`.
    """
    entries: list[NamedLeaf] = []
    paths = iter(trees.paths(tree))
    for node in jax.tree.leaves(tree, is_leaf=is_variable):
        if not is_variable(node):
            entries.append(NamedLeaf(next(paths), node, None, None))
            continue
        leaves = jax.tree.leaves(node)
        axes = node.get_metadata().get("axes") if len(leaves) == 1 else None
        named = tuple(axes) if axes is not None else None
        entries += [NamedLeaf(next(paths), leaf, named, type(node)) for leaf in leaves]
    return entries


def variable_paths(tree: Any) -> list[str]:
    """Return the "/"-joined path of each Variable of an NNX state, sorted."""
    return sorted("/".join(map(str, path)) for path, _ in nnx.to_flat_state(tree))


def tree_problems(expected: Any, tree: Any) -> list[str]:
    """Return a line for each leaf that is missing, unexpected, or of an unexpected shape."""
    expected_shapes = {named.path: np.shape(named.leaf) for named in named_leaves(expected)}
    shapes = {named.path: np.shape(named.leaf) for named in named_leaves(tree)}
    problems = [
        f"{path}: missing, expected shape {expected_shapes[path]}"
        for path in expected_shapes.keys() - shapes
    ]
    problems += [
        f"{path}: unexpected, has shape {shapes[path]}" for path in shapes.keys() - expected_shapes
    ]
    problems += [
        f"{path}: expected shape {shape}, found {shapes[path]}"
        for path, shape in expected_shapes.items()
        if path in shapes and shapes[path] != shape
    ]
    return sorted(problems)


def leaves_by_item(items: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the leaves of trees by item and path."""
    return {
        item: {named.path: named.leaf for named in named_leaves(tree)}
        for item, tree in items.items()
    }


def arrays_among(leaves: Sequence[Any]) -> Sequence[Any]:
    """Return the JAX arrays among leaves; fast if the leaves have few types."""
    kinds = {*map(type, leaves)}
    others = {kind for kind in kinds if not issubclass(kind, jax.Array)}
    return [leaf for leaf in leaves if type(leaf) not in others] if others else leaves


def too_wide(tree: Any) -> list[str]:
    """Return a line for each Python number or NumPy array whose dtype JAX would change, sorted."""
    leaves = jax.tree.leaves(tree)
    if len(arrays_among(leaves)) == len(leaves):
        return []  # fast path: computing paths takes longer
    wide = {
        named.path: np.asarray(named.leaf).dtype
        for named in named_leaves(tree)
        if not isinstance(named.leaf, jax.Array)
    }
    canonical = {path: jax.dtypes.canonicalize_dtype(dtype) for path, dtype in wide.items()}
    return [
        f"{path}: {dtype}, of which JAX makes {canonical[path]}"
        for path, dtype in sorted(wide.items())
        if canonical[path] != dtype
    ]


def rebuild(expected: Any, tree: Any, *, path: object) -> Any:
    """Return the leaves of `tree` in the containers of `expected`, such as NNX States.

    A tree of equal structure is returned itself. A nested dict must have the same paths and shapes.

    Args:
        expected: tree with the containers and shapes.
        tree: tree with the leaves.
        path: name of the tree in errors.

    Raises:
        TreeStructureError: if paths or shapes differ; lists every difference.
    """
    structures: list[Any] = [jax.tree.structure(tree), jax.tree.structure(expected)]
    if structures[0] == structures[1] and _shapes(tree) == _shapes(expected):
        return tree
    problems = tree_problems(expected, tree)
    if problems:
        raise TreeStructureError(
            count_text(len(problems), "leaf does not fit", "leaves do not fit"),
            path=path,
            expected=f"the {len(named_leaves(expected))} leaves of the state's own tree",
            next_step="pass a tree with exactly these paths and shapes",
            problems=problems,
        )
    leaves = {named.path: named.leaf for named in named_leaves(tree)}
    ordered = [leaves[named.path] for named in named_leaves(expected)]
    return jax.tree.unflatten(jax.tree.structure(expected), ordered)


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def own_variables(tree: Any) -> Any:
    """Return the tree with new Variables around the same arrays.

    The Variables that `nnx.split` and `nnx.state` return belong to the module, so that a call of
    the module would change the state, too.
    """
    return jax.tree.map(lambda leaf: leaf, tree)
