"""Pytrees as flat mappings from a path (see `path_of`) to a leaf, and back. Imports JAX.

Every tree is stored as a nested plain dict with string keys, so that no container type needs to be
known to read it. Containers come back from the target that the caller restores into: whether a leaf
lay at the position 0 of a list or under the key "0" of a dict is for the target to say, and the
leaf at "0" is the same.
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from cairn.storage.arrays import array_name, keys_of, path_of
from cairn.storage.errors import TreeMismatchError, UnsupportedLeafError
from cairn.storage.store import is_text

__all__ = ["difference", "flatten", "nest", "paths", "unflatten", "unnest"]

KeyPath = tuple[Any, ...]


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by path, in the tree's own order; None and empty containers have none.

    Dict keys, attribute names and positions become the segments of a path. An `nnx.Variable`
    stands for its value.

    Raises:
        UnsupportedLeafError: a key is empty, ".", "..", or no text that UTF-8 has a form for; or
            two leaves have one path, or one name in Orbax, which joins keys by ".". All such keys
            are listed.
    """
    leaves: dict[str, Any] = {}
    problems: list[str] = []
    for keys, leaf in _walk(tree):
        segments = [_segment(key) for key in keys]
        path = path_of(segments)
        if not _is_safe(segments):
            problems.append(repr(path))
        elif path in leaves:
            problems.append(f"{path!r} (twice)")
        leaves[path] = leaf
    prefixes = {path[:cut] for path in leaves for cut in _slashes(path)}
    problems += sorted(f"{path!r} (also a container)" for path in prefixes & leaves.keys())
    problems += _alike_in_orbax(leaves)
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
    """The path of every leaf, in the order of `jax.tree.leaves`."""
    return [path_of(map(_segment, keys)) for keys, _ in _walk(tree)]


def unflatten(target: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree with the containers of `target` and the leaves given by path.

    Raises:
        TreeMismatchError: the paths of `target` are not those of `leaves`; lists every difference.
    """
    wanted = paths(target)
    problems = difference(wanted, leaves)
    if problems:
        raise TreeMismatchError(
            "the trees differ",
            expected=f"{len(wanted)} leaves of the target",
            found=f"{len(leaves)} leaves",
            next_step="Rebuild the target as it was saved.",
            problems=problems,
        )
    structure = jax.tree.structure(target)
    return jax.tree.unflatten(structure, [leaves[path] for path in wanted])


def difference(wanted: Iterator[str] | Mapping[str, Any] | list[str], found: Any) -> list[str]:
    """One line for each path that is only in `wanted` (missing) or only in `found` (unexpected)."""
    wanted_paths, found_paths = set(wanted), set(found)
    missing = [f"{path}: expected by the target, not stored" for path in wanted_paths - found_paths]
    extra = [f"{path}: stored, not in the target" for path in found_paths - wanted_paths]
    return sorted(missing) + sorted(extra)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested plain dicts with the leaves at their paths: the form in which trees are stored."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = keys_of(path)
        node = root
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return root


def unnest(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What `nest` was given: leaves by path. Anything but a mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for key, node in tree.items():
        path = f"{prefix}{path_of((key,))}"
        if isinstance(node, Mapping):
            leaves.update(unnest(node, f"{path}/"))
        else:
            leaves[path] = node
    return leaves


def _walk(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """(key path, leaf) in `jax.tree.leaves` order, without the key that leads into a Variable."""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[0]:
        if not _is_variable(leaf):
            yield keys, leaf
            continue
        for inner, value in jax.tree_util.tree_flatten_with_path(leaf)[0]:
            yield (*keys, *inner[1:]), value


def _is_variable(node: Any) -> bool:
    """True for an `nnx.Variable`; without importing Flax, for if it isn't loaded there are none."""
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


def _is_safe(segments: list[str]) -> bool:
    """A bare leaf has no path at all; "." and ".." mean something else where paths are walked."""
    return bool(segments) and all(
        segment not in ("", ".", "..") and "\x00" not in segment and is_text(segment)
        for segment in segments
    )


def _alike_in_orbax(paths: Collection[str]) -> list[str]:
    """One line for each path whose array Orbax would call as it calls that of another."""
    if not any("." in path for path in paths):
        return []
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(array_name(path), []).append(path)
    return [
        f"{path!r} (as {name!r} in Orbax, like {others[0]!r})"
        for name, (*others, path) in by_name.items()
        if others
    ]


def _slashes(path: str) -> list[int]:
    return [index for index, character in enumerate(path) if character == "/"]
