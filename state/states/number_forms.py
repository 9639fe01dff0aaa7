"""Python numbers and weakly typed arrays in a state, which a load restores as they were.

A save stores Python numbers as arrays. JAX converts Python numbers to weakly typed arrays, which in
computations adopt the dtypes of other arrays. Since that affects results, a checkpoint records
which leaves were numbers, and which arrays were weakly typed.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cairn.state.checkpointing.leaf_forms import dtype_name
from cairn.state.checkpointing.modules import FlatTrees
from cairn.state.paths import arrays_among, leaves_by_item, named_leaves
from cairn.state.states.checkpoint import StoredCheckpoint, stored_float
from cairn.storage.arrays.dtypes import dtype_named
from cairn.storage.runs.records.manifest import LeafRecord

__all__ = ["NumberForms", "python_numbers", "weak_leaves"]

_WEAK: Final = operator.attrgetter("aval.weak_type")
_KINDS: Mapping[type, str] = {bool: "b", int: "iu", float: "f", complex: "c"}


def python_numbers(items: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the type of each leaf that is a Python number, by item and path."""
    return {
        item: {
            named.path: type(named.leaf).__name__
            for named in named_leaves(tree)
            if type(named.leaf) in _KINDS
        }
        for item, tree in items.items()
    }


def weak_leaves(items: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the paths of the weakly typed arrays, by item; items without any are left out.

    A checkpoint stores the result as `weak` in its meta.

    Args:
        items: trees by name, or their leaves by path.
    """
    flat: Mapping[str, Mapping[str, Any]]
    if isinstance(items, FlatTrees):
        flat = items
    elif _any_weak(jax.tree.leaves(dict(items))):
        flat = leaves_by_item(items)
    else:  # fast path: computing paths takes long
        return {}
    weak = {
        item: sorted(path for path, leaf in leaves.items() if getattr(leaf, "weak_type", False))
        for item, leaves in flat.items()
        if _any_weak([*leaves.values()])
    }
    return {item: paths for item, paths in weak.items() if paths}


class NumberForms:
    """Conversion of one item's leaves when they are loaded into a target of arrays and numbers."""

    def __init__(
        self, checkpoint: StoredCheckpoint, item: str, target: Any, *, stored_dtypes: bool = False
    ) -> None:
        """Compare the target with the stored item.

        Args:
            checkpoint: the checkpoint.
            item: name of the item.
            target: tree of arrays, abstract arrays and numbers.
            stored_dtypes: whether floating arrays are restored in their stored floating dtype.
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
        """Tree of the shapes and dtypes that the stored item must have."""
        return self._unflatten([form.check for form in self._forms])

    @property
    def ask(self) -> Any:
        """Target for the restore."""
        return self._unflatten([form.ask for form in self._forms])

    def finished(self, restored: Any) -> Any:
        """Return the restored tree with the target's kinds of leaves: numbers or weak arrays."""
        leaves = []
        for leaf, form in zip(jax.tree.leaves(restored), self._forms, strict=True):
            like = form.like
            if like is None:
                leaves.append(leaf)
            elif like.sharding is None or not getattr(like, "committed", True):
                leaves.append(jnp.asarray(leaf))
            else:
                # The number: a local array of it can't be moved to devices of other processes.
                leaves.append(jax.device_put(leaf, like.sharding))
        return self._unflatten(leaves)

    def _unflatten(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self._target), leaves)


class _Form(NamedTuple):
    """Conversion of one leaf when it is loaded.

    Attributes:
        check: abstract array of the shape and dtype that the stored leaf must have.
        ask: the target's leaf for the restore.
        like: weakly typed array like which the restored number is converted; None to keep it.
    """

    check: Any
    ask: Any
    like: Any = None


def _form(
    leaf: Any, record: LeafRecord | None, from_python: bool, weak: bool, stored_dtypes: bool
) -> _Form:
    number = leaf if type(leaf) in _KINDS else _number_of(leaf, from_python)
    if (
        number is not leaf
        and not from_python
        and record is not None
        and hasattr(leaf, "dtype")
        and dtype_name(leaf.dtype) == record.dtype
    ):
        number = None  # an array was saved, and is restored as one
    if number is not None and record is not None and _takes(number, record):
        # A number has no dtype of its own, so any stored one fits.
        check = np.zeros((), dtype_named(record.dtype))
        stays_array = isinstance(leaf, jax.Array) or (hasattr(leaf, "dtype") and not from_python)
        return _Form(check, number, leaf if stays_array else None)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        # An uncommitted array's sharding is no requirement.
        place = leaf.sharding if getattr(leaf, "committed", True) else None
        dtype = stored_float(leaf, record) if stored_dtypes and record is not None else leaf.dtype
        abstract = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place, weak_type=weak)
        return _Form(abstract, abstract)
    return _Form(np.asarray(leaf), leaf)


def _number_of(leaf: Any, from_python: bool) -> Any:
    """Return a Python number of the leaf's kind if JAX made the leaf from a number; else None.

    JAX marks such leaves as weakly typed, except bools; for bools the checkpoint's record counts.
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


def _any_weak(leaves: Sequence[Any]) -> bool:
    return any(map(_WEAK, arrays_among(leaves)))
