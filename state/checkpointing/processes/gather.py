"""Exchange of bytes between processes over the network of their devices.

A collective has no deadline: the caller must have agreed with the others that all of them call.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = ["GATHER_BYTES", "gather_bytes"]

GATHER_BYTES: Final = 32 << 20
"""Bytes of all processes that a device holds at a time."""

_LEAST_BYTES: Final = 1 << 12
"""Minimum size of a piece; sizes are powers of two, so that few programs are compiled."""


def gather_bytes(members: tuple[int, ...], streams: Sequence[np.ndarray[Any, Any]]) -> None:
    """Fill the other members' streams with their bytes. All members must call this.

    Args:
        members: the processes, in order; this one is among them.
        streams: of each member, its bytes, or memory for them; all members know all lengths.
    """
    mesh = _mesh(members)
    mine = streams[members.index(jax.process_index())]
    split = NamedSharding(mesh, PartitionSpec("member"))
    longest, done = max(map(len, streams)), 0
    while done < longest:
        size = _piece(longest - done, len(members))
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


def _piece(left: int, members: int) -> int:
    """Return the bytes per member in the next round."""
    most = max(_LEAST_BYTES, 1 << (GATHER_BYTES // members).bit_length() - 1)
    return min(most, max(_LEAST_BYTES, 1 << (left - 1).bit_length()))


@functools.lru_cache(maxsize=256)
def _mesh(members: tuple[int, ...]) -> Mesh:
    """Return a mesh of one device per process: more would receive the same bytes again."""
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda each: each.id):
        first.setdefault(device.process_index, device)
    return Mesh(
        np.array([first[member] for member in members]), ("member",), axis_types=(AxisType.Auto,)
    )


@functools.lru_cache(maxsize=256)
def _program(mesh: Mesh) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
