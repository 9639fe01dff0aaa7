"""What a leaf of a restore target asks for, and whether what is stored fits it. Imports JAX."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cairn.storage.arrays import Region, aligned_empty, origin_of
from cairn.storage.reading import LeafInfo
from cairn.storage.training.leaf_forms import dtype_name, is_key_dtype

__all__ = ["PlacedLeaf", "TargetLeaf", "target_leaf"]

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
        committed: False if JAX may move it to where other arguments of a computation are.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None
    scalar: type | None
    committed: bool = True

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
        elif self.sharding is not None and not is_key_dtype(self.dtype):
            made = jax.dtypes.canonicalize_dtype(self.dtype)
            if made != self.dtype:
                problems.append(
                    f"expected dtype {dtype_name(self.dtype)}, of which JAX makes "
                    f"{dtype_name(made)}; set jax_enable_x64 for the whole process, or restore "
                    "it as a NumPy array"
                )
        return problems

    def _takes(self, dtype: Any, cast: bool) -> bool:
        if self.dtype is None and self.scalar is not None:
            return not is_key_dtype(dtype) and np.dtype(dtype).kind in _KINDS[self.scalar][0]
        if self.dtype == dtype:
            return True
        return cast and _is_floating(dtype) and _is_floating(self.dtype)

    def empty(self) -> Any:
        """The leaf, if it has no elements."""
        nothing = np.zeros(self.shape, self.dtype)
        if self.sharding is None:
            return nothing
        return self.place(self.shape, self.dtype, lambda index: nothing[index])

    def place(self, shape: tuple[int, ...], dtype: Any, part: Callable[[Any], Any]) -> jax.Array:
        """The array of JAX, on its devices; without a copy, where one is not needed.

        Args:
            shape: of the whole; of typed keys that of their words.
            dtype: its dtype.
            part: gives what lies at an index of it.
        """
        assert self.sharding is not None
        if self.committed:
            return jax.make_array_from_callback(shape, self.sharding, part, dtype=dtype)
        (device,) = self.sharding.device_set
        with jax.default_device(device):
            return jnp.asarray(part((slice(None),) * len(shape)), dtype)

    def finish(self, value: Any) -> Any:
        """`value`, read in logical dtype, as the type that was asked for."""
        if self.scalar is not None:
            item = np.asarray(value)[()]
            return self.scalar(item) if self.dtype is None else item
        if self.sharding is None and self.dtype is not None:
            return np.asarray(value).astype(self.dtype, copy=False)
        return value if value.dtype == self.dtype else value.astype(self.dtype)


class PlacedLeaf:
    """A leaf being read: the parts of it that this process holds, and what is made of them.

    Attributes:
        regions: the parts, to be filled with the stored elements.
        stays: the memory of the parts becomes the leaf's; it need not be moved to other devices.
    """

    def __init__(self, target: TargetLeaf, info: LeafInfo) -> None:
        """Make room for them.

        Args:
            target: what to make; it fits what is stored.
            info: what is stored.
        """
        self._target = target
        self._dtype = info.dtype if is_key_dtype(target.dtype) else target.dtype
        self._shape = info.shape  # of typed keys: of their words
        origins: dict[tuple[int, ...], int] = {(0,) * len(info.shape): 0}
        part, platforms = info.shape, {"cpu"}
        if target.sharding is not None:
            part = target.sharding.shard_shape(info.shape)
            places: Mapping[Any, Any] = target.sharding.addressable_devices_indices_map(info.shape)
            platforms = {device.platform for device in places}
            origins = {}
            for index in places.values():
                origins.setdefault(origin_of(index), len(origins))
        values = aligned_empty([part] * len(origins), info.dtype)
        self.regions = [Region(*one) for one in zip(origins, values, strict=True)]
        self.stays = platforms == {"cpu"}

    def value(self, *, key_impl: str | None) -> Any:
        """The leaf, in the dtype that the target asks for, once its regions are filled.

        Args:
            key_impl: of a leaf of typed PRNG keys: their implementation.
        """
        dtype, sharding = self._target.dtype, self._target.sharding
        whole: Any
        parts = [region.values for region in self.regions]
        if key_impl is None and dtype is not None:
            parts = [part.astype(dtype, copy=False) for part in parts]
        if sharding is None:
            (whole,) = parts
        else:
            origins = (region.origin for region in self.regions)
            by_origin = dict(zip(origins, parts, strict=True))
            whole = self._target.place(
                self._shape, self._dtype, lambda index: by_origin[origin_of(index)]
            )
        return whole if key_impl is None else jax.random.wrap_key_data(whole, impl=key_impl)


def _is_floating(dtype: Any) -> bool:
    return not is_key_dtype(dtype) and bool(jnp.issubdtype(dtype, jnp.floating))


def target_leaf(leaf: Any) -> TargetLeaf:
    """What the leaf of a target asks for.

    Raises:
        TypeError: it is neither an array, a description of one, nor a number.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding, committed = leaf.sharding, not isinstance(leaf, jax.Array) or leaf.committed
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            committed = False
        return TargetLeaf(tuple(leaf.shape), leaf.dtype, sharding, None, committed)
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
