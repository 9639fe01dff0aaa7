"""Trees by the paths of their leaves: keys joined by "/", as rules and checkpoints see them.

Checkpoints have a "/" within a key as "%2F" (see `cairn.storage.arrays.path_of`); rules do not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

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
    """Leaf of a tree, its path, and the logical axis names that its Variable carries."""

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
        """The keys joined as they are, for rules and people: a "/" in a key is like any other."""
        return "/".join(keys_of(self.path))


def is_variable(node: object) -> bool:
    """Return whether a node is an NNX Variable, the box around one array of a module."""
    return isinstance(node, nnx.Variable)


def has_variables(module: Any, kind: type[Any]) -> bool:
    """Return whether a module has Variables of a kind; JAX finds them in a tenth of NNX's time."""
    leaves = jax.tree.leaves(module, is_leaf=is_variable)
    if any(isinstance(leaf, nnx.Module) for leaf in leaves):  # they are no trees to JAX
        return bool(jax.tree.leaves(nnx.state(module, kind)))
    return any(isinstance(leaf, kind) for leaf in leaves)


def named_leaves(tree: Any) -> list[NamedLeaf]:
    """Return the leaves of a tree in JAX's order, each with its path.

    A Variable stands for its value: it adds nothing to the path, and its metadata entry `axes`
    (one logical name per dimension) goes with the leaf.
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
    """List every leaf by which a tree differs from the expected one, in path or shape."""
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
    """Return the JAX arrays among leaves, fast if most leaves have one type."""
    kinds = {*map(type, leaves)}
    others = {kind for kind in kinds if not issubclass(kind, jax.Array)}
    return [leaf for leaf in leaves if type(leaf) not in others] if others else leaves


def too_wide(tree: Any) -> list[str]:
    """List Python numbers and NumPy arrays whose dtypes JAX would change, sorted."""
    leaves = jax.tree.leaves(tree)
    if len(arrays_among(leaves)) == len(leaves):
        return []  # to name leaves takes longer
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
    """Return the given leaves in the containers of the expected tree.

    A tree of the very same structure is returned as it is; a nested dict of the same paths and
    shapes is put into the containers (NNX States and Variables) that are expected.

    Raises:
        TreeStructureError: if paths or shapes differ; lists every leaf.
    """
    structures: list[Any] = [jax.tree.structure(tree), jax.tree.structure(expected)]
    if structures[0] == structures[1] and _shapes(tree) == _shapes(expected):
        return tree
    problems = tree_problems(expected, tree)
    if problems:
        raise TreeStructureError(
            f"{len(problems)} leaves do not fit",
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
    """Return the tree with Variables of its own around the same arrays.

    Those of `nnx.split` and `nnx.state` are the module's: calling it would change the state too.
    """
    return jax.tree.map(lambda leaf: leaf, tree)
