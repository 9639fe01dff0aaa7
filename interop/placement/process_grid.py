"""Devices of each process on a mesh: every process has a box of the same size."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

from cairn.interop.errors import ArgumentError
from cairn.interop.partition_axis import AxisEntry, entry_axes
from cairn.interop.placement.specs import MeshSizes, mesh_text

__all__ = ["MOST_DEVICES", "ProcessGrid"]

MOST_DEVICES: Final = 2**20
"""Most devices of a mesh that `ProcessGrid` accepts."""


@dataclass(frozen=True)
class ProcessGrid:
    """A mesh of devices, divided equally among processes.

    Attributes:
        sizes: number of devices along each mesh axis.
        processes: number of processes. In the order of the mesh, the first process has the first
            devices, the second the next, and so on; each has a box of the mesh.
    """

    sizes: MeshSizes
    processes: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"{name or 'an axis without a name'}: expected a size of 1 or more, found {size}"
            for name, size in self.sizes.items()
            if size < 1 or not name
        ]
        if not self.sizes:
            problems.append("expected at least one axis")
        if not problems and self.devices > MOST_DEVICES:
            problems.append(f"expected at most {MOST_DEVICES} devices, found {self.devices}")
        if not problems and (self.processes < 1 or self.devices % self.processes):
            problems.append(
                f"processes: expected a number that divides {self.devices} devices, "
                f"found {self.processes}"
            )
        if not problems:
            covered = prod(self.box.values()) * self.processes == self.devices
            if not covered or any(self.sizes[axis] % count for axis, count in self.box.items()):
                problems.append(
                    f"processes: expected devices that fill whole axes from the last one on, found "
                    f"{self.devices // self.processes} devices a process"
                )
        if problems:
            raise ArgumentError(
                "no such mesh can be",
                path=f"mesh {mesh_text(self.sizes)}",
                problems=problems,
                next_step="give sizes such as fsdp=8, tp=4, and processes that have whole axes",
            )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return prod(self.sizes.values())

    @cached_property
    def box(self) -> dict[str, int]:
        """Number of a process's devices along each mesh axis."""
        left = self.devices // self.processes
        counts: dict[str, int] = {}
        for name, size in reversed(list(self.sizes.items())):
            counts[name] = min(left, size)
            # With a remainder there are no equal boxes; `__post_init__` then finds too few devices.
            left = left // size if left % size == 0 else 1
        return {name: counts[name] for name in self.sizes}

    def box_count(self, entries: Iterable[AxisEntry]) -> int:
        """Return the number of different shards of a leaf on a process's devices."""
        return prod(self.box[axis] for entry in entries for axis in entry_axes(entry))
