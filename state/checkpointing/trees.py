"""Conversion of pytrees to flat mappings from path (see `path_of`) to leaf, and back. Imports JAX.

Every tree is stored as nested plain dicts with string keys, so that readers need no container
types. Position 0 of a list and the key "0" of a dict have the same path, "0"; a restore gets the
containers from its target.
"""

import operator
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from cairn.counts import count_text
from cairn.storage.arrays.leaf_paths import keys_of, path_of
from cairn.storage.arrays.orbax_tree import array_name
from cairn.storage.errors import TreeMismatchError, UnsupportedLeafError
from cairn.storage.store.uri import is_text

__all__ = [
    "child_nodes",
    "difference",
    "flatten",
    "holds",
    "is_variable",
    "nest",
    "paths",
    "unflatten",
]


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of `tree` by path, in the order of `jax.tree.leaves`.

    Dict keys, attribute names and positions become the segments of a path. None and empty
    containers have no leaf. The leaf of an `nnx.Variable` is its value.

    Raises:
        UnsupportedLeafError: a key is empty, ".", "..", or not encodable in UTF-8; or two leaves
            have the same path, or the same name in Orbax, which joins keys by "."; all are listed.
    """
    walk = _Walk(tree)
    leaves = dict(zip(walk.paths, walk.leaves, strict=True))
    problems = [*walk.odd]
    if len(walk.paths) != len(leaves):
        counts = Counter(walk.paths)
        problems += [f"{path!r} (twice)" for path, count in counts.items() if count > 1]
    problems += _alike_in_orbax(leaves) if walk.dotted else []
    problems += sorted(f"{path!r} (also a container)" for path in walk.containers & leaves.keys())
    if problems:
        raise UnsupportedLeafError(
            "keys that can't be stored",
            path=", ".join(problems),
            expected='keys that are valid text without "\\0", not empty, "." or "..", and paths '
            'that differ, also when joined by "."',
            found=f"{len(problems)} that do not",
            next_step="Rename these keys before saving.",
        )
    return leaves


def paths(tree: Any) -> list[str]:
    """Return the path of every leaf, in the order of `jax.tree.leaves`."""
    return _Walk(tree).paths


def holds(tree: Any, kinds: tuple[type, ...]) -> bool:
    """Return True if the tree has a node of one of these types."""
    if isinstance(tree, kinds):
        return True
    leaves: set[type] = {type(None)}
    waiting = [tree]
    while waiting:
        inner = _inner(waiting.pop())
        for kind in {*map(type, inner)} - leaves:
            if issubclass(kind, kinds):
                return True
            first = next(child for child in inner if type(child) is kind)
            if is_variable(first) or jax.tree_util.all_leaves(
                [first]
            ):  # no Variable holds a module
                leaves.add(kind)
            else:
                waiting += [child for child in inner if type(child) is kind]
    return False


def _inner(node: Any) -> Collection[Any]:
    """Return the children of a node, as JAX flattens it; empty for a leaf."""
    match node:
        case dict():
            return node.values()
        case list() | tuple():
            return node
        case _:
            return jax.tree.leaves(node, is_leaf=lambda inner: inner is not node)


def unflatten(target: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a tree with the containers of `target` and the given leaves, by path.

    Raises:
        TreeMismatchError: the paths of `target` and `leaves` differ; all differences are listed.
    """
    target_paths = paths(target)
    problems = difference(target_paths, leaves)
    if problems:
        raise TreeMismatchError(
            "the trees differ",
            expected=f"{count_text(len(target_paths), 'leaf')} of the target",
            found=count_text(len(leaves), "leaf"),
            next_step="Rebuild the target as it was saved.",
            problems=problems,
        )
    structure = jax.tree.structure(target)
    return jax.tree.unflatten(structure, [leaves[path] for path in target_paths])


def difference(expected: Iterator[str] | Mapping[str, Any] | list[str], stored: Any) -> list[str]:
    """Return a line for each path only in `expected` (missing) or only in `stored` (unexpected)."""
    expected_paths, stored_paths = set(expected), set(stored)
    missing = [
        f"{path}: expected by the target, not stored" for path in expected_paths - stored_paths
    ]
    extra = [f"{path}: stored, not in the target" for path in stored_paths - expected_paths]
    return sorted(missing) + sorted(extra)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return leaves, given by path, as nested plain dicts: the stored form of trees."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = keys_of(path)
        node = root
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return root


class _Kind(Enum):
    """Kind of a tree's node: how to find its children."""

    LEAF = 1
    NOTHING = 2
    DICT = 3
    SEQUENCE = 4
    OTHER = 5
    """Node that only JAX can flatten."""


class _Walk:
    """Traversal of a tree's leaves, in the order of `jax.tree.leaves`.

    JAX's own traversal with paths takes some microseconds per leaf, more than staging a small leaf:
    in a save of many leaves it would take most of the time.

    Attributes:
        paths: paths of the leaves.
        leaves: the leaves, in the same order.
        containers: paths of the containers.
        odd: paths with a key that can't be stored, formatted for the error.
        dotted: True if a key contains ".".
    """

    def __init__(self, tree: Any) -> None:
        self.paths: list[str] = []
        self.leaves: list[Any] = []
        self.containers: set[str] = set()
        self.odd: list[str] = []
        self.dotted = False
        self._kinds: dict[type, _Kind] = {}
        self._segments: dict[str, str] = {}
        kind = self._kind_of(tree)
        if kind is _Kind.LEAF:  # a leaf alone has no key
            self.paths, self.leaves, self.odd = [""], [tree], [repr("")]
        elif kind is not _Kind.NOTHING:
            self._open(tree, kind, "")

    def _open(self, node: Any, kind: _Kind, prefix: str) -> None:
        """Traverse a container whose children's paths begin with `prefix`."""
        children: Iterable[tuple[str, Any]]
        if kind is _Kind.DICT and {*map(type, node)} <= {str}:
            if self._are_leaves(node.values()):
                self._take(node, prefix)
                return
            children = sorted(node.items(), key=_FIRST)
        elif kind is _Kind.SEQUENCE:
            children = ((str(number), child) for number, child in enumerate(node))
        elif is_variable(node):
            self._open_variable(node, prefix)
            return
        else:
            children = child_nodes(node)
        kinds, segments, paths, leaves = self._kinds, self._segments, self.paths, self.leaves
        for key, child in children:
            path = prefix + (segments.get(key) or self._checked(key, prefix))
            child_kind = kinds.get(type(child)) or self._kind_of(child)
            if child_kind is _Kind.LEAF:
                paths.append(path)
                leaves.append(child)
            elif child_kind is not _Kind.NOTHING:
                self.containers.add(path)
                self._open(child, child_kind, f"{path}/")

    def _are_leaves(self, nodes: Collection[Any]) -> bool:
        for kind in {*map(type, nodes)}:
            if kind not in self._kinds:
                self._kind_of(next(node for node in nodes if type(node) is kind))
            if self._kinds[kind] is not _Kind.LEAF:
                return False
        return True

    def _take(self, leaves: Mapping[str, Any], prefix: str) -> None:
        """Add a dict that has only leaves, with minimal Python work per leaf."""
        names = list(leaves)
        keys = sorted(names)
        self.leaves += leaves.values() if keys == names else map(leaves.__getitem__, keys)
        text = "".join(keys)
        plain = text.isascii() and not any(character in text for character in _WRITTEN_OTHERWISE)
        if plain and not _NO_KEYS & leaves.keys():
            self.dotted = self.dotted or "." in text
            self.paths += [prefix + key for key in keys]
        else:
            seen = self._segments
            self.paths += [prefix + (seen.get(key) or self._checked(key, prefix)) for key in keys]

    def _open_variable(self, variable: Any, prefix: str) -> None:
        """Traverse a Variable: its value is a leaf, or a tree, at the Variable's path."""
        for _, child in child_nodes(variable):
            kind = self._kind_of(child)
            if kind is _Kind.LEAF:
                self.containers.discard(prefix[:-1])
                self.paths.append(prefix[:-1])
                self.leaves.append(child)
            elif kind is not _Kind.NOTHING:
                self._open(child, kind, prefix)

    def _checked(self, key: str, prefix: str) -> str:
        """Return a key's path segment; keys that can be stored are cached."""
        segment = path_of((key,))
        self.dotted = self.dotted or "." in key
        # "." and ".." have a meaning in file paths.
        if key not in _NO_KEYS and "\x00" not in key and is_text(key):
            self._segments[key] = segment
        else:
            self.odd.append(repr(prefix + segment))
        return segment

    def _kind_of(self, node: Any) -> _Kind:
        """Return a node's kind, cached by its type."""
        kind = type(node)
        if kind not in self._kinds:
            self._kinds[kind] = _KINDS.get(kind) or (
                _Kind.LEAF if jax.tree_util.all_leaves([node]) else _Kind.OTHER
            )
        return self._kinds[kind]


_NO_KEYS: Final = frozenset({"", ".", ".."})
_WRITTEN_OTHERWISE: Final = "/%\0"
"""Characters that are escaped in a path, or not allowed."""

_FIRST: Final = operator.itemgetter(0)
_KINDS: Final = {
    dict: _Kind.DICT,
    list: _Kind.SEQUENCE,
    tuple: _Kind.SEQUENCE,
    type(None): _Kind.NOTHING,
}


def child_nodes(node: Any) -> list[tuple[str, Any]]:
    """Return (key, child) for each child of a container, in JAX's order."""
    opened = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)[0]
    return [(_segment(key), child) for (key,), child in opened]


def is_variable(node: Any) -> bool:
    """Return True for an `nnx.Variable`, without importing Flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def _segment(key: Any) -> str:
    match key:
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
        case GetAttrKey():
            return str(key.name)
        case SequenceKey():
            return str(key.idx)
        case _:
            return str(key)


def _alike_in_orbax(paths: Collection[str]) -> list[str]:
    """Return a line for each path whose array would have the same name in Orbax as another's."""
    if len(set(map(array_name, paths))) == len(paths):
        return []
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(array_name(path), []).append(path)
    return [
        f"{path!r} (as {name!r} in Orbax, like {others[0]!r})"
        for name, (*others, path) in by_name.items()
        if others
    ]
