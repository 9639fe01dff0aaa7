"""Python numbers in a state: stored as arrays, and numbers again when they are loaded.

JAX makes arrays of such numbers that give way to the dtypes of others (weakly typed). Which those
are is stored too, as it decides the dtype of what is computed with them.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cairn.state.paths import arrays_among, leaves_by_item, named_leaves
from cairn.state.saving.checkpoint import StoredCheckpoint, stored_float
from cairn.storage.arrays import dtype_named
from cairn.storage.runs import LeafRecord
from cairn.storage.training import FlatTrees, dtype_name

__all__ = ["NumberForms", "python_numbers", "weak_leaves"]

_WEAK: Final = operator.attrgetter("aval.weak_type")
_KINDS: Mapping[type, str] = {bool: "b", int: "iu", float: "f", complex: "c"}


def python_numbers(items: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns the paths of the leaves that are Python numbers, by item, each with its type."""
    return {
        item: {
            named.path: type(named.leaf).__name__
            for named in named_leaves(tree)
            if type(named.leaf) in _KINDS
        }
        for item, tree in items.items()
    }


def weak_leaves(items: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the paths of the arrays that are weakly typed, by item; items without any have none.

    The meta of a checkpoint keeps them as `weak`.

    Args:
        items: trees by name, or their leaves by path.
    """
    flat = items if isinstance(items, FlatTrees) else _flat(items)
    weak = {
        item: sorted(path for path, leaf in leaves.items() if _is_weak(leaf))
        for item, leaves in flat.items()
        if _any_weak([*leaves.values()])
    }
    return {item: paths for item, paths in weak.items() if paths}


def _flat(items: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The leaves of trees by path; none if none is weakly typed, for to name them takes long."""
    if not _any_weak(jax.tree.leaves(dict(items))):
        return {}
    return leaves_by_item(items)


class NumberForms:
    """How the leaves of one item are loaded into a target of arrays and numbers."""

    def __init__(
        self, checkpoint: StoredCheckpoint, item: str, target: Any, *, stored_dtypes: bool = False
    ) -> None:
        """Look at the target beside what is stored.

        Args:
            checkpoint: the checkpoint.
            item: the item.
            target: a tree of arrays, abstract ones, and numbers.
            stored_dtypes: floating arrays keep the floating dtype that they are stored in.
        """
        stored = checkpoint.leaves(item)
        numbers = checkpoint.meta.get("python_numbers", {}).get(item, {})
        self._target = target
        self._forms = [
            _form(
                named.leaf,
                stored.get(named.path),
                named.path in numbers,
                checkpoint.is_weak(item, named.path, named.leaf),
                stored_dtypes,
            )
            for named in named_leaves(target)
        ]

    @property
    def check(self) -> Any:
        """The tree that must fit what is stored."""
        return self._unflatten([form.check for form in self._forms])

    @property
    def ask(self) -> Any:
        """The tree to restore into."""
        return self._unflatten([form.ask for form in self._forms])

    def finished(self, restored: Any) -> Any:
        """Returns what was restored, with numbers where the target has some."""
        leaves = zip(jax.tree.leaves(restored), self._forms, strict=True)
        return self._unflatten(
            [leaf if form.like is None else _weak(leaf, form.like) for leaf, form in leaves]
        )

    def _unflatten(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self._target), leaves)


class _Form(NamedTuple):
    """How one leaf is loaded.

    Attributes:
        check: what must fit the stored leaf.
        ask: what to restore it into.
        like: the weakly typed array to make of the restored number; None to keep it as it is.
    """

    check: Any
    ask: Any
    like: Any = None


def _form(
    leaf: Any, record: LeafRecord | None, from_python: bool, weak: bool, stored_dtypes: bool
) -> _Form:
    number = leaf if type(leaf) in _KINDS else _number_of(leaf, from_python)
    if number is not leaf and not from_python and record is not None and _is_alike(leaf, record):
        number = None  # an array was saved, and is restored as one
    if number is not None and record is not None and _takes(number, record):
        # The dtype is the stored one by choice: a number has no other.
        check = np.zeros((), dtype_named(record.dtype))
        stays_array = isinstance(leaf, jax.Array) or (hasattr(leaf, "dtype") and not from_python)
        return _Form(check, number, leaf if stays_array else None)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        # What JAX may move has no place of its own.
        place = leaf.sharding if getattr(leaf, "committed", True) else None
        dtype = stored_float(leaf, record) if stored_dtypes and record is not None else leaf.dtype
        abstract = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place, weak_type=weak)
        return _Form(abstract, abstract)
    return _Form(np.asarray(leaf), leaf)


def _number_of(leaf: Any, from_python: bool) -> Any:
    """A Python number of a leaf's kind, if JAX made the leaf of one; else None.

    JAX types such a leaf weakly; of bools it keeps no trace, but the checkpoint does.
    """
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or leaf.shape != ():
        return None
    if leaf.dtype == jnp.bool_:
        return False if from_python and isinstance(leaf, jax.ShapeDtypeStruct) else None
    if not getattr(leaf, "weak_type", False):
        return None
    number = np.zeros((), leaf.dtype).item()
    return number if jnp.asarray(number).dtype == leaf.dtype else None


def _takes(number: Any, record: LeafRecord) -> bool:
    if record.shape or record.dtype.startswith("key<"):
        return False
    return dtype_named(record.dtype).kind in _KINDS[type(number)]


def _is_alike(leaf: Any, record: LeafRecord) -> bool:
    return hasattr(leaf, "dtype") and dtype_name(leaf.dtype) == record.dtype


def _any_weak(leaves: Sequence[Any]) -> bool:
    return any(map(_WEAK, arrays_among(leaves)))


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))


def _weak(number: Any, like: Any) -> Any:
    # The number itself: an array that one process has would not go to the devices of others.
    free = like.sharding is None or not getattr(like, "committed", True)
    return jnp.asarray(number) if free else jax.device_put(number, like.sharding)
