"""Placement of optimizer leaves: like the parameter that they mirror.

`state.sharding.optimizers` uses it to place a whole state.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cairn.interop.partition_axis import AxisEntry
from cairn.interop.placement.rules import LARGE_LEAF_ELEMENTS, resolve_spec
from cairn.interop.placement.specs import Entries, MeshSizes, mesh_text, without_trailing_nones

__all__ = [
    "FACTORED",
    "MIRRORS",
    "REPLICATED",
    "Mirror",
    "find_parameter",
    "inherited_entries",
    "mirror",
]

Parameter = TypeVar("Parameter")

MIRRORS = "mirrors its parameter"
FACTORED = "factored from its parameter"
REPLICATED = "replicated"


class Mirror(NamedTuple):
    """Placement of a leaf that is not a model's.

    Attributes:
        rule: `MIRRORS`, `FACTORED`, `REPLICATED` or "automatic".
        entries: mesh axes of each dimension.
        unmatched: why a large leaf is replicated although its parameter is split; None: it is not.
        parameter: path of the parameter that the leaf's path contains; None if there is none.
    """

    rule: str
    entries: Entries
    unmatched: str | None = None
    parameter: tuple[str, ...] | None = None


def mirror(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    parameters: Mapping[tuple[str, ...], tuple[tuple[int, ...], Entries]],
    mesh: MeshSizes,
) -> Mirror:
    """Return the placement of a leaf that is not a model's, given that of the parameters.

    Args:
        path: keys of the leaf's path.
        shape: shape of the leaf.
        parameters: shape and mesh axes of each parameter, by the keys of its path.
        mesh: devices along each mesh axis.
    """
    prefix, own, parameter = find_parameter(path, parameters)
    placement: Mirror | None = None
    if parameter is not None:
        whole, entries = parameter
        left = entries if whole == shape else inherited_entries(prefix, shape, whole, entries)
        if left is not None:
            placement = Mirror(
                MIRRORS if whole == shape else FACTORED, without_trailing_nones(left)
            )
    if placement is None and prod(shape) >= LARGE_LEAF_ELEMENTS:
        automatic = resolve_spec(shape, mesh)
        placement = Mirror(automatic.rule, automatic.entries)
    if placement is None:
        placement = Mirror(REPLICATED, ())
    if parameter is not None:
        placement = placement._replace(parameter=own)
    split = parameter is None or bool(parameter[1])
    if (
        prod(shape) < LARGE_LEAF_ELEMENTS
        or placement.entries
        or not split
        or prod(mesh.values()) == 1
    ):
        return placement
    text = f"large, and whole on every device of {mesh_text(mesh)} (shape {shape})"
    return placement._replace(unmatched=text)


def find_parameter(
    path: tuple[str, ...], parameters: Mapping[tuple[str, ...], Parameter]
) -> tuple[tuple[str, ...], tuple[str, ...], Parameter | None]:
    """Return the parameter with the longest path that a leaf's path contains.

    Returns:
        The keys before the parameter's path in the leaf's path, the parameter's path, and its entry
        in `parameters`; `((), (), None)` if there is none.
    """
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length, -1, -1):
            own = path[start : start + length]
            parameter = parameters.get(own)
            if parameter is not None:
                return path[:start], own, parameter
    return (), (), None


def inherited_entries(
    prefix: tuple[str, ...],
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    spec: Sequence[AxisEntry],
) -> list[Any] | None:
    """Return mesh axes for a leaf whose shape differs from its parameter's; None if unclear.

    The leaf may have more leading dimensions, some of size 1, or lack one. If the parameter has
    equal dimensions, it can be unclear which of them is missing, except in Adafactor's leaves:
    `v_row` lacks the last dimension in the order of `np.argsort`, a longest one, and `v_col` the
    one before it. After None, the caller places the leaf as if it mirrored nothing, which is never
    wrong and only takes more memory.

    Args:
        prefix: keys before the parameter's path in the leaf's path.
        shape: shape of the leaf.
        whole: shape of the parameter.
        spec: mesh axes of the parameter's dimensions.
    """
    entries = [*spec, *[None] * (len(whole) - len(spec))]
    if len(shape) > len(whole) and whole and shape[-len(whole) :] == whole:
        return [*[None] * (len(shape) - len(whole)), *entries]
    if len(shape) == len(whole):
        if any(own not in (1, size) for own, size in zip(shape, whole, strict=True)):
            return None
        return [
            entry if own == size else None
            for own, size, entry in zip(shape, whole, entries, strict=True)
        ]
    candidates = [
        dimension
        for dimension in range(len(whole))
        if whole[:dimension] + whole[dimension + 1 :] == shape
    ]
    if not candidates:
        return None
    by_length = [int(dimension) for dimension in np.argsort(whole)]
    if len(candidates) > 1 and "v_row" in prefix:
        candidates = by_length[-1:]
    elif len(candidates) > 1 and "v_col" in prefix:
        candidates = by_length[-2:-1]
    left = [entries[:dimension] + entries[dimension + 1 :] for dimension in candidates]
    return left[0] if all(other == left[0] for other in left) else None
