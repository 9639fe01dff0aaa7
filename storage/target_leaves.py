"""What a leaf of a restore target asks for, and whether what is stored fits it. Imports JAX."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from storage.four_bits import packed_axis, packed_shape
from storage.leaf_forms import STORED_DTYPES, LeafForm, dtype_name, is_key_dtype, packed_place

__all__ = ["TargetLeaf", "target_leaf"]

_KINDS: dict[type, tuple[str, str]] = {
    bool: ("b", "a Python bool"),
    int: ("iu", "a Python int"),
    float: ("f", "a Python float"),
    complex: ("fc", "a Python complex"),
}


class TargetLeaf(NamedTuple):
    """One leaf of a target.

    Attributes:
        shape: wanted shape.
        dtype: wanted dtype; None for Python numbers, which take any dtype of their kind.
        sharding: where to put it; None for leaves that stay on the host.
        scalar: the type of scalar to make (Python's or NumPy's); None for arrays.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None
    scalar: type | None

    def misfits(self, stored: jax.ShapeDtypeStruct, cast: bool) -> list[str]:
        """Why a leaf of this shape and dtype can't be restored here; nothing if it can."""
        problems = []
        if tuple(stored.shape) != self.shape:
            problems.append(f"expected shape {self.shape}, stored {tuple(stored.shape)}")
        elif self.sharding is not None:
            try:
                self.sharding.shard_shape(self.shape)
            except ValueError as exc:
                problems.append(f"shape {self.shape} does not fit its sharding: {exc}")
        if not self._takes(stored.dtype, cast):
            wanted = _KINDS[self.scalar][1] if self.dtype is None and self.scalar else None
            expected = wanted or f"dtype {dtype_name(self.dtype)}"
            problems.append(f"expected {expected}, stored dtype {dtype_name(stored.dtype)}")
        return problems

    def _takes(self, dtype: Any, cast: bool) -> bool:
        if self.dtype is None and self.scalar is not None:
            return not is_key_dtype(dtype) and np.dtype(dtype).kind in _KINDS[self.scalar][0]
        if self.dtype == dtype:
            return True
        return cast and _is_floating(dtype) and _is_floating(self.dtype)

    def abstract(
        self, stored: jax.ShapeDtypeStruct, form: LeafForm | None, stored_shape: tuple[int, ...]
    ) -> Any:
        """What to ask Orbax for: the stored form, in this leaf's place.

        Raises:
            ValueError: `stored_shape` is not one that the form gives this leaf.
        """
        dtype, shape, sharding = self.dtype, self.shape, self.sharding
        if form is not None and form.kind == "packed":
            axis = packed_axis(shape, stored_shape)
            sharding = sharding and packed_place(shape, axis, sharding)
            shape, dtype = packed_shape(shape, axis), np.dtype(np.uint8)
        elif form is not None and form.kind in ("widened", "bits"):
            dtype = np.dtype(np.uint8)
        elif dtype is not None and dtype != stored.dtype and dtype_name(dtype) not in STORED_DTYPES:
            dtype = stored.dtype  # TensorStore can't cast to it; `finish` does
        if sharding is not None:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        # A NumPy array that takes no memory: Orbax looks at its type, shape and dtype only.
        return np.broadcast_to(np.zeros((), dtype), shape) if dtype is not None else np.ndarray

    def empty(self) -> Any:
        """The leaf, if it has no elements."""
        nothing = np.zeros(self.shape, self.dtype)
        if self.sharding is None:
            return nothing
        return jax.make_array_from_callback(self.shape, self.sharding, lambda index: nothing[index])

    def finish(self, value: Any) -> Any:
        """`value`, read in logical dtype, as the type that was asked for."""
        if self.scalar is not None:
            item = np.asarray(value)[()]
            return self.scalar(item) if self.dtype is None else item
        if self.sharding is None and self.dtype is not None:
            return np.asarray(value).astype(self.dtype, copy=False)
        return value if value.dtype == self.dtype else value.astype(self.dtype)


def _is_floating(dtype: Any) -> bool:
    return not is_key_dtype(dtype) and bool(jnp.issubdtype(dtype, jnp.floating))


def target_leaf(leaf: Any) -> TargetLeaf:
    """What the leaf of a target asks for.

    Raises:
        TypeError: it is neither an array, a description of one, nor a number.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding = leaf.sharding
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return TargetLeaf(tuple(leaf.shape), leaf.dtype, sharding, None)
    if isinstance(leaf, np.ndarray):
        return TargetLeaf(leaf.shape, leaf.dtype, None, None)
    if isinstance(leaf, np.generic):
        return TargetLeaf((), leaf.dtype, None, type(leaf))
    if type(leaf) in _KINDS:
        return TargetLeaf((), None, None, type(leaf))
    raise TypeError(
        f"a restore target's leaf is {type(leaf).__name__}: expected jax.ShapeDtypeStruct, "
        "jax.Array, a NumPy array or scalar, or a Python number"
    )
