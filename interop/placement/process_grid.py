"""Devices of each process on a mesh: boxes of one size, in the order of the mesh."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

from cairn.interop.errors import ArgumentError
from cairn.interop.partition_axis import AxisEntry
from cairn.interop.placement.specs import MeshSizes, entry_axes, mesh_text

__all__ = ["MOST_DEVICES", "ProcessGrid"]

MOST_DEVICES: Final = 2**20
"""Devices of a mesh that a plan is made for."""


@dataclass(frozen=True)
class ProcessGrid:
    """A mesh of devices, of which each process has as many as any other.

    Attributes:
        sizes: devices along each axis.
        processes: how many there are. The first has the first devices in the order of the mesh, the
            second those after them, and so on; each has a box of the mesh.
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
        """Devices of each process along each axis."""
        left = self.devices // self.processes
        counts: dict[str, int] = {}
        for name, size in reversed(list(self.sizes.items())):
            counts[name] = min(left, size)
            # What is left over is no whole axis: then the boxes do not add up to the mesh.
            left = left // size if left % size == 0 else 1
        return {name: counts[name] for name in self.sizes}

    def box_count(self, entries: Iterable[AxisEntry]) -> int:
        """Return the number of different boxes of a leaf that a process has."""
        return prod(self.box[axis] for entry in entries for axis in entry_axes(entry))
