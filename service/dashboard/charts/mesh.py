"""Grid of the shards into which a partition spec splits a tensor on a mesh."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cairn.interop.partition_axis import entry_axes
from cairn.service.errors import InvalidRequestError

MAX_PARTS: Final = 64
_WIDTH: Final = 360
_HEIGHT: Final = 200
_AXIS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,63})\s*=\s*([1-9][0-9]{0,8})")

Spec = Sequence[str | Sequence[str] | None]


@dataclass(frozen=True)
class Splitting:
    """Sharding of a tensor on a mesh.

    Attributes:
        parts: Number of shards along each dimension.
        part: Shape of a shard, rounded up where a dimension does not divide evenly.
        copies: Number of devices that hold the same shard.
        devices: Number of devices of the mesh.
        whole: True if every dimension divides evenly.
        axes: Mesh axes that split each dimension, as text.
        columns, rows: Positions of the grid lines in the picture; empty if too many to draw.
    """

    parts: tuple[int, ...]
    part: tuple[int, ...]
    copies: int
    devices: int
    whole: bool
    axes: tuple[str, ...]
    columns: tuple[float, ...]
    rows: tuple[float, ...]
    width: int = _WIDTH
    height: int = _HEIGHT

    @property
    def count(self) -> int:
        """Number of distinct shards."""
        return math.prod(self.parts)

    @property
    def part_width(self) -> float:
        """Width of a shard in the picture."""
        return round(self.width / (self.parts[-1] if self.parts else 1), 1)

    @property
    def part_height(self) -> float:
        """Height of a shard in the picture."""
        return round(self.height / (self.parts[-2] if len(self.parts) > 1 else 1), 1)


def splitting(shape: Sequence[int], spec: Spec | None, mesh: Mapping[str, int]) -> Splitting:
    """Compute the sharding of a tensor; without a spec it is replicated on all devices."""
    padded = [*(spec or ()), *([None] * len(shape))][: len(shape)]
    named = [entry_axes(entry) for entry in padded]
    parts = tuple(math.prod(mesh.get(axis, 1) for axis in axes) for axes in named)
    devices = math.prod(mesh.values())
    across, down = (parts[-1] if parts else 1), (parts[-2] if len(parts) > 1 else 1)
    drawn = across <= MAX_PARTS and down <= MAX_PARTS
    return Splitting(
        parts=parts,
        part=tuple(math.ceil(size / count) for size, count in zip(shape, parts, strict=True)),
        copies=max(1, devices // math.prod(parts)),
        devices=devices,
        whole=all(size % count == 0 for size, count in zip(shape, parts, strict=True)),
        axes=tuple(" × ".join(axes) or "–" for axes in named),
        columns=tuple(_WIDTH * at / across for at in range(1, across)) if drawn else (),
        rows=tuple(_HEIGHT * at / down for at in range(1, down)) if drawn else (),
    )


def mesh_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the mesh in a model's configuration, or {} if a size is missing or not positive."""
    names = config.get("sharding_axis_names")
    sizes = config.get("sharding_axis_dims")
    if not isinstance(names, list) or not isinstance(sizes, list) or len(names) != len(sizes):
        return {}
    is_mesh = all(isinstance(size, int) and size > 0 for size in sizes)
    return {str(name): size for name, size in zip(names, sizes, strict=True)} if is_mesh else {}


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Format a mesh as people type it: `fsdp=4,tp=2`."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def parse_mesh(text: str) -> dict[str, int]:
    """Parse a mesh such as `fsdp=4,tp=2` into the number of devices along each axis.

    Raises:
        InvalidRequestError: The text is not a mesh, or names an axis twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or match[1] in sizes:
            detail = f"mesh: {part.strip()[:60]!r} is no axis with a size. Write fsdp=4,tp=2, "
            detail += "each axis once."
            raise InvalidRequestError(detail, errors=[{"field": "mesh", "detail": detail}])
        sizes[match[1]] = int(match[2])
    return sizes
