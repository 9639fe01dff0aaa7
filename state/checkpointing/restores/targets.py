"""Descriptions of a target's leaves, and creation of leaves as described. Imports JAX."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from cairn.state.checkpointing.leaf_forms import dtype_name, is_key_dtype, why_no_plain_array
from cairn.state.checkpointing.restores.host_memory import HostMemory, Slot
from cairn.state.checkpointing.restores.weak_types import weakly_typed
from cairn.storage.arrays.box_buffers import BoxBuffer, aligned_empty, origin_of
from cairn.storage.errors import TreeMismatchError
from cairn.storage.reading.item_arrays import LeafInfo

__all__ = ["Casts", "PlacedLeaf", "TargetLeaf", "cast_values", "local_boxes", "target_leaf"]

_KINDS: dict[type, tuple[str, str]] = {
    bool: ("b", "a Python bool"),
    int: ("iu", "a Python int"),
    float: ("f", "a Python float"),
    complex: ("fc", "a Python complex"),
}


Casts = Literal["none", "floats", "numbers"]
"""Leaves that may change dtype: none, floating ones, or also integers whose values all fit."""


class TargetLeaf(NamedTuple):
    """Description of a leaf to restore.

    Attributes:
        shape: the leaf's shape.
        dtype: the leaf's dtype; None for Python numbers, for which any stored dtype of their kind
            fits.
        sharding: the leaf's sharding; None for leaves that stay on the host.
        scalar: type of the scalar (Python's or NumPy's); None for arrays.
        committed: False if JAX may move the array to the devices of a computation's other
            arguments.
        weak: True if the array is weakly typed, like one made of a Python number.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None
    scalar: type | None
    committed: bool = True
    weak: bool = False

    def misfits(self, stored: jax.ShapeDtypeStruct | LeafInfo, casts: Casts) -> list[str]:
        """Return the reasons why a stored leaf can't be restored as described; empty if it can."""
        problems = []
        if tuple(stored.shape) != self.shape:
            problems.append(f"expected shape {self.shape}, stored {tuple(stored.shape)}")
        elif isinstance(getattr(self.sharding, "mesh", None), jax.sharding.AbstractMesh):
            problems.append(
                "expected a sharding on devices, found one on an AbstractMesh, which has none "
                "(jax.eval_shape makes such of explicit axes); give it one on the Mesh itself"
            )
        elif self.sharding is not None:
            try:
                if not isinstance(self.sharding, jax.sharding.SingleDeviceSharding):
                    local_boxes(self.sharding, self.shape)
            except ValueError as exc:
                problems.append(f"shape {self.shape} does not fit its sharding: {exc}")
        if not self._takes(stored.dtype, casts):
            kind = _KINDS[self.scalar][1] if self.dtype is None and self.scalar else None
            expected = kind or f"dtype {dtype_name(self.dtype)}"
            problems.append(f"expected {expected}, stored dtype {dtype_name(stored.dtype)}")
        elif self.sharding is not None and not is_key_dtype(self.dtype):
            usable = _dtype_of_jax(self.dtype, bool(jax.config.read("jax_enable_x64")))
            if usable != self.dtype:
                problems.append(
                    f"expected dtype {dtype_name(self.dtype)}, of which JAX makes "
                    f"{dtype_name(usable)}; set jax_enable_x64 for the whole process, or restore "
                    "it as a NumPy array"
                )
        return problems

    def _takes(self, dtype: Any, casts: Casts) -> bool:
        if self.dtype is None and self.scalar is not None:
            return not is_key_dtype(dtype) and np.dtype(dtype).kind in _KINDS[self.scalar][0]
        if self.dtype == dtype:
            return True
        dtypes = (dtype, self.dtype)
        if casts == "numbers" and all(jnp.issubdtype(kind, jnp.integer) for kind in dtypes):
            return True
        return casts != "none" and all(jnp.issubdtype(kind, jnp.floating) for kind in dtypes)

    def empty(self) -> Any:
        """Return the leaf, which must be one without elements."""
        nothing = np.zeros(self.shape, self.dtype)
        if self.sharding is None:
            return nothing
        return self.place(self.shape, self.dtype, lambda index: nothing[index])

    def place(self, shape: tuple[int, ...], dtype: Any, part: Callable[[Any], Any]) -> jax.Array:
        """Return the leaf as a jax.Array on its devices, made without a copy where possible.

        Args:
            shape: shape of the whole array; for typed keys, that of their words.
            dtype: dtype of the array.
            part: function from an index (a slice per axis) to the values there.
        """
        assert self.sharding is not None
        if self.committed:
            return jax.make_array_from_callback(shape, self.sharding, part, dtype=dtype)
        (device,) = self.sharding.device_set
        with jax.default_device(device):
            return jnp.asarray(part((slice(None),) * len(shape)), dtype)

    def finish(self, value: Any) -> Any:
        """Return a value that was read, converted to the described type and dtype."""
        if self.scalar is not None:
            item = np.asarray(value)[()]
            return self.scalar(item) if self.dtype is None else item
        if self.sharding is None and self.dtype is not None:
            return np.asarray(value).astype(self.dtype, copy=False)
        value = value if value.dtype == self.dtype else value.astype(self.dtype)
        return weakly_typed(value) if self.weak else value


class PlacedLeaf:
    """Leaf that is being read, with memory for the boxes that this process holds.

    Attributes:
        regions: buffers to fill with the stored elements, one per box; empty before `take`.
    """

    def __init__(self, target: TargetLeaf, info: LeafInfo) -> None:
        """Prepare the leaf; `take` allocates its memory.

        Args:
            target: description of the leaf to return; the stored leaf must fit it.
            info: description of the stored leaf.
        """
        self._target = target
        self._dtype = info.dtype if is_key_dtype(target.dtype) else target.dtype
        self._stored = info.dtype
        self._shape = info.shape  # for typed keys, the shape of their words
        self._local_boxes = LocalBoxes(info.shape, ((0,) * len(info.shape),), on_cpu=True)
        if target.sharding is not None:
            self._local_boxes = local_boxes(target.sharding, info.shape)
        self._slot: Slot | None = None
        self.regions: list[BoxBuffer] = []

    def fits(self, memory: HostMemory) -> bool:
        """Return True if `memory` has room for the regions."""
        shape, origins, on_cpu = self._local_boxes
        return on_cpu or memory.fits(shape, len(origins), self._stored)

    def take(self, memory: HostMemory) -> Self:
        """Allocate the regions in `memory`, in which they must fit, and return this leaf."""
        shape, origins, on_cpu = self._local_boxes
        if self._target.sharding is None:
            values = aligned_empty([shape], self._stored)
        elif on_cpu:
            values = memory.lasting(shape, len(origins), self._stored)
        else:
            values, self._slot = memory.passing(shape, len(origins), self._stored)
        self.regions = [BoxBuffer(*region) for region in zip(origins, values, strict=True)]
        return self

    def value(self, *, key_impl: str | None, where: str) -> Any:
        """Return the leaf in the target's dtype; its regions must be filled.

        Args:
            key_impl: name of the PRNG implementation of typed keys; None for other leaves.
            where: name of the leaf in errors.

        Raises:
            TreeMismatchError: a stored integer does not fit the target's dtype.
        """
        dtype, sharding = self._target.dtype, self._target.sharding
        whole: Any
        parts = [region.values for region in self.regions]
        if key_impl is None and dtype is not None and parts[0].dtype != dtype:
            parts = [cast_values(part, dtype, where) for part in parts]
        if sharding is None:
            (whole,) = parts
        else:
            origins = (region.origin for region in self.regions)
            by_origin = dict(zip(origins, parts, strict=True))
            (only,) = parts if len(parts) == 1 else (None,)
            whole = self._target.place(
                self._shape,
                self._dtype,
                lambda index: by_origin[origin_of(index)] if only is None else only,
            )
        if key_impl is not None:
            whole = jax.random.wrap_key_data(whole, impl=key_impl)
        if self._slot is not None:
            self._slot.value = whole
        return whole


class LocalBoxes(NamedTuple):
    """Boxes of an array that this process holds.

    Attributes:
        shape: shape of each box.
        origins: index of the first element of each box.
        on_cpu: True if all devices that hold them are CPUs.
    """

    shape: tuple[int, ...]
    origins: tuple[tuple[int, ...], ...]
    on_cpu: bool


@functools.lru_cache(maxsize=4096)
def local_boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> LocalBoxes:
    """Return the boxes of an array that this process holds.

    Raises:
        ValueError: the sharding does not divide the shape.
    """
    part = sharding.shard_shape(shape)
    places: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
    origins = dict.fromkeys(origin_of(index) for index in places.values())
    return LocalBoxes(part, tuple(origins), {device.platform for device in places} == {"cpu"})


@functools.lru_cache(maxsize=256)
def _dtype_of_jax(dtype: Any, x64: bool) -> Any:
    return jax.dtypes.canonicalize_dtype(dtype)


def cast_values(part: np.ndarray[Any, Any], dtype: Any, where: str) -> np.ndarray[Any, Any]:
    """Return values converted to another dtype.

    Raises:
        TreeMismatchError: an integer does not fit the dtype.
    """
    if jnp.issubdtype(dtype, jnp.integer) and part.size:
        limits = jnp.iinfo(dtype)
        smallest, largest = int(part.min()), int(part.max())
        if smallest < limits.min or largest > limits.max:
            stored = dtype_name(part.dtype)
            raise TreeMismatchError(
                "stored integers do not fit the dtype of the target",
                path=where,
                expected=f"{dtype_name(dtype)}, from {limits.min} to {limits.max}",
                found=f"{stored}, from {smallest} to {largest}",
                next_step=f"Restore it as {stored}.",
            )
    return part.astype(dtype)


def target_leaf(leaf: Any) -> TargetLeaf:
    """Return the description of a target's leaf.

    Raises:
        TypeError: the leaf is not an array, a `jax.ShapeDtypeStruct` or a number.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding, committed = leaf.sharding, not isinstance(leaf, jax.Array) or leaf.committed
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            committed = False
        weak = bool(getattr(leaf, "weak_type", False))  # typed keys lack the attribute
        return TargetLeaf(tuple(leaf.shape), _native(leaf.dtype), sharding, None, committed, weak)
    if isinstance(leaf, np.ndarray):
        reason = why_no_plain_array(leaf)
        if reason is not None:
            raise TypeError(f"a restore target's leaf: {reason}")
        return TargetLeaf(leaf.shape, _native(leaf.dtype), None, None)
    if isinstance(leaf, np.generic):
        return TargetLeaf((), leaf.dtype, None, type(leaf))
    if type(leaf) in _KINDS:
        return TargetLeaf((), None, None, type(leaf))
    raise TypeError(
        f"a restore target's leaf is {type(leaf).__name__}: expected jax.ShapeDtypeStruct, "
        "jax.Array, a NumPy array or scalar, or a Python number"
    )


def _native(dtype: Any) -> Any:
    """Return the dtype in this machine's byte order, in which values are read."""
    return dtype if is_key_dtype(dtype) else np.dtype(dtype).newbyteorder("=")
