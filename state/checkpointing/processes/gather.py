"""Exchange of bytes between processes over the network of their devices.

The collective has no deadline: before the call, all processes must have agreed to make it.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = ["GATHER_BYTES", "gather_bytes"]

GATHER_BYTES: Final = 32 << 20
"""Maximum bytes on a device in one round: those of all processes together."""

_LEAST_BYTES: Final = 1 << 12
"""Minimum bytes per process in one round. Sizes are powers of two, so that few programs compile."""


def gather_bytes(members: tuple[int, ...], streams: Sequence[np.ndarray[Any, Any]]) -> None:
    """Send this process's bytes to the other members, and receive theirs. All members must call it.

    Args:
        members: the processes that exchange bytes, in order; this process is one of them.
        streams: one buffer per member, of the same lengths on all members. This process's buffer
            has the bytes to send; the others' buffers are filled.
    """
    mesh = _mesh(members)
    mine = streams[members.index(jax.process_index())]
    split = NamedSharding(mesh, PartitionSpec("member"))
    most = max(_LEAST_BYTES, 1 << (GATHER_BYTES // len(members)).bit_length() - 1)
    longest, done = max(map(len, streams)), 0
    while done < longest:
        size = min(most, max(_LEAST_BYTES, 1 << (longest - done - 1).bit_length()))
        row = np.zeros((1, size), np.uint8)
        own = mine[done : done + size]
        row[0, : len(own)] = own
        shape = (len(members), size)
        placed = [jax.device_put(row, mesh.local_devices[0])]
        array = jax.make_array_from_single_device_arrays(shape, split, placed)
        with jax.set_mesh(mesh):  # the caller's mesh may have other devices
            rows = np.asarray(_program(mesh)(array).addressable_data(0))
        for stream, piece in zip(streams, rows, strict=True):
            if stream is not mine and done < len(stream):
                stream[done : done + size] = piece[: len(stream) - done]
        done += size


@functools.lru_cache(maxsize=256)
def _mesh(members: tuple[int, ...]) -> Mesh:
    """Return a mesh of one device per process; others of its devices would get the same bytes."""
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda each: each.id):
        first.setdefault(device.process_index, device)
    return Mesh(
        np.array([first[member] for member in members]), ("member",), axis_types=(AxisType.Auto,)
    )


@functools.lru_cache(maxsize=256)
def _program(mesh: Mesh) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
