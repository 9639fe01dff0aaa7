"""Division of pretrained weights among processes for reading, and their exchange afterwards.

A process reads the slices that its devices hold. If these are columns of the tensor in the file,
every process would have to read nearly the whole tensor. Then each process reads a share of the
rows instead, and the devices exchange them.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from cairn.interop.conversion.boxes import Box
from cairn.interop.conversion.ops import Array
from cairn.interop.conversion.rules import Rule
from cairn.interop.weights.rule_slices import Slice, read_slices, slice_bytes
from cairn.interop.weights.weight_source import WeightSource
from cairn.storage.arrays.box_buffers import aligned_empty
from cairn.storage.arrays.boxes import fill
from cairn.storage.arrays.dtypes import is_floating

__all__ = ["Target", "exchanged", "read_places", "read_rule", "spans_processes"]

WORTH_BYTES: Final = 64 << 10
"""Minimum bytes that an exchange must save each process from reading, to be worth its cost."""


_SPARE_BYTES: Final = 256
"""Maximum bytes of an allocation beyond the one array in it, for JAX to take the allocation."""


class Target(NamedTuple):
    """Description of a leaf to load.

    Attributes:
        path: the leaf's path.
        shape: the leaf's shape.
        dtype: the leaf's dtype.
        place: the leaf's sharding.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: Sharding


def spans_processes(places: Iterable[Sharding]) -> bool:
    """Return whether one of the shardings uses devices of another process."""
    return any(not place.is_fully_addressable for place in places)


def read_places(source: WeightSource, rule: Rule, targets: Sequence[Target]) -> list[Sharding]:
    """Return the shardings into which the leaves of a rule are read.

    They are the leaves' own, or others with which each process reads less; `exchanged` then moves
    the leaves to their own. They follow from shapes and shardings, so all processes get the same.
    """
    own = [target.place for target in targets]
    if not spans_processes(own):
        return own
    axes = range(max(len(target.shape) for target in targets))
    choices = [own, *([_along(target, axis) for target in targets] for axis in axes)]
    costs = [_cost(source, rule, targets, places) for places in choices]
    best = min(range(len(choices)), key=costs.__getitem__)
    return choices[best] if costs[0] - costs[best] >= WORTH_BYTES else own


def read_rule(
    source: WeightSource, rule: Rule, targets: Sequence[Target], places: Sequence[Sharding]
) -> list[jax.Array]:
    """Return the leaves of a rule, read into the shardings `places`.

    A leaf that was not read into its target's sharding has an unsigned integer dtype, with the bits
    of its values, until `exchanged`. Each slice is sent to its local devices as soon as it is read,
    while the next one is read. When this returns, all transfers are complete.
    """
    holders = [_holders(target.shape, place) for target, place in zip(targets, places, strict=True)]
    slices = [Slice(leaf, box) for leaf, boxes in enumerate(holders) for box, _ in boxes.values()]
    by_device: list[dict[jax.Device, jax.Array]] = [{} for _ in targets]
    sent: list[jax.Array] = []
    for leaf_slice, values in read_slices(source, rule, slices):
        target = targets[leaf_slice.leaf]
        is_own = places[leaf_slice.leaf] == target.place
        owned = _own(values, target.dtype)
        ready = owned if is_own else owned.view(_bits(target.dtype))
        _, devices = holders[leaf_slice.leaf][_key(leaf_slice.box)]
        jax.block_until_ready(sent)  # what is on its way is in host memory too
        sent = [jax.device_put(ready, device) for device in devices]
        by_device[leaf_slice.leaf] |= dict(zip(devices, sent, strict=True))
        del values, owned, ready
    leaves = [
        _assembled(target, place, arrays)
        for target, place, arrays in zip(targets, places, by_device, strict=True)
    ]
    jax.block_until_ready(leaves)
    return leaves


def exchanged(array: jax.Array, target: Target) -> jax.Array:
    """Return a leaf that `read_rule` read, in the sharding and dtype of its target.

    All processes must call this.

    Args:
        array: the leaf, in the sharding it was read into.
        target: description of the leaf.
    """
    if array.sharding == target.place:
        return array
    moved: jax.Array = _exchange(target.place, target.dtype)(array)
    return moved


@functools.lru_cache(maxsize=256)
def _exchange(place: Sharding, dtype: np.dtype[Any]) -> Callable[[jax.Array], jax.Array]:
    def exchange(bits: jax.Array) -> jax.Array:
        # Bits are exchanged: with floats, the compiler may add zeros (-0.0 + 0) or widen them.
        there = jax.lax.with_sharding_constraint(bits, place)
        return jax.lax.bitcast_convert_type(there, dtype)

    return jax.jit(exchange, out_shardings=place)


def _along(target: Target, axis: int) -> Sharding:
    """Return the target's sharding with all of its mesh axes moved to one dimension.

    The sharding is returned unchanged if the axes do not divide the dimension, or if the leaf
    can't be exchanged: if it is local, not floating, or wider than 32 bits.
    """
    place = target.place
    if (
        not isinstance(place, NamedSharding)
        or place.is_fully_addressable
        or any(kind != AxisType.Auto for kind in place.mesh.axis_types)
        or axis >= len(target.shape)
        or not is_floating(target.dtype)
        or target.dtype.itemsize > np.dtype(np.uint32).itemsize
    ):
        return place
    entries = [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in place.spec
    ]
    before = entries[axis] if axis < len(entries) else ()
    others = [name for n, entry in enumerate(entries) if n != axis for name in entry]
    names = (*before, *others)
    divisor = math.prod(place.mesh.shape[name] for name in names)
    if not others or target.shape[axis] % divisor:
        return place
    spec = PartitionSpec(*(None,) * axis, names)
    return NamedSharding(place.mesh, spec, memory_kind=place.memory_kind)


def _cost(
    source: WeightSource, rule: Rule, targets: Sequence[Target], places: Sequence[Sharding]
) -> int:
    """Return the bytes that each process reads if the leaves are read into these shardings."""
    slices = []
    for leaf, (target, place) in enumerate(zip(targets, places, strict=True)):
        indices: Mapping[Any, Any] = place.devices_indices_map(target.shape)
        boxes = [
            (device.process_index, _box(index, target.shape)) for device, index in indices.items()
        ]
        first = min(process for process, _ in boxes)
        mine = {_key(box): box for process, box in boxes if process == first}
        slices += [Slice(leaf, box) for box in mine.values()]
    return slice_bytes(source, rule, slices)


_Key = tuple[tuple[int, int], ...]


def _holders(shape: Sequence[int], place: Sharding) -> dict[_Key, tuple[Box, list[jax.Device]]]:
    """Return the boxes of a leaf that this process's devices hold, each with these devices."""
    holders: dict[_Key, tuple[Box, list[jax.Device]]] = {}
    for device, index in place.addressable_devices_indices_map(tuple(shape)).items():
        box = _box(index, shape)
        holders.setdefault(_key(box), (box, []))[1].append(device)
    return holders


def _box(index: tuple[slice, ...] | None, shape: Sequence[int]) -> Box:
    parts = (part.indices(size) for part, size in zip(index or (), shape, strict=True))
    return tuple(slice(start, stop) for start, stop, _ in parts)


def _key(box: Box) -> _Key:
    return tuple((part.start, part.stop) for part in box)


def _own(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return the values as a C-order array whose memory nothing else uses, so that JAX can keep it.

    They are copied only if necessary.
    """
    root = values
    while isinstance(root.base, np.ndarray):
        root = root.base
    is_own = root.flags.writeable and root.nbytes < values.nbytes + _SPARE_BYTES
    if is_own and values.dtype == dtype and values.flags.c_contiguous:
        return values
    (copy,) = aligned_empty([values.shape], dtype)
    fill(copy, values)
    return copy


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def _assembled(
    target: Target, place: Sharding, by_device: dict[jax.Device, jax.Array]
) -> jax.Array:
    """Return the global array of a leaf, made of the arrays on each local device."""
    dtype = target.dtype if place == target.place else _bits(target.dtype)
    canonical = jax.dtypes.canonicalize_dtype(dtype)
    if canonical != dtype:
        warnings.warn(
            f"{target.path}: stored as {dtype}, which JAX holds as {canonical}; set jax_enable_x64 "
            "to keep it",
            stacklevel=2,
        )
    devices = place.addressable_devices_indices_map(target.shape)
    arrays = [by_device[device] for device in devices]
    return jax.make_array_from_single_device_arrays(target.shape, place, arrays, dtype=canonical)
