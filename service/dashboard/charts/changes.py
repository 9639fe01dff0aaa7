"""Bars of how much layers and tensors changed between two steps."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cairn.service.schemas import LeafDifference
from cairn.storage.arrays.leaf_paths import keys_of


@dataclass(frozen=True)
class ChangeBar:
    """Relative change of a leaf or a layer.

    Attributes:
        name: Path of the leaf or layer.
        item: Item of the leaf or layer.
        relative: Norm of the difference, divided by the norm of this step's elements.
        share: `relative`, divided by the largest one that is shown.
    """

    name: str
    item: str
    relative: float
    share: float


def bars_of(differences: Sequence[LeafDifference]) -> list[ChangeBar]:
    """Return a bar per leaf whose values were compared, the largest change first."""
    return _bars(
        (leaf.item, leaf.path, leaf.values.relative)
        for leaf in differences
        if leaf.values is not None and leaf.values.relative is not None
    )


def layers_of(differences: Sequence[LeafDifference]) -> list[ChangeBar]:
    """Return a bar per layer, the largest change first.

    The norms of a layer are over all of its leaves whose values differ.
    """
    squares: dict[tuple[str, str], tuple[float, float]] = {}
    for leaf in differences:
        values = leaf.values
        if values is None or not values.relative or not isinstance(values.norm, float):
            continue
        key = (leaf.item, layer_of(leaf.path))
        changed, whole = squares.get(key, (0.0, 0.0))
        norm = values.norm / values.relative  # of this step: `relative` is the quotient
        squares[key] = (changed + values.norm**2, whole + norm**2)
    return _bars(
        (item, layer, math.sqrt(changed / whole))
        for (item, layer), (changed, whole) in squares.items()
        if whole > 0 and math.isfinite(changed) and math.isfinite(whole)
    )


def layer_of(path: str) -> str:
    """Return the layer of a leaf: its path up to the first number.

    If the path has no number, the layer is the module: the path without its last key.
    """
    keys = keys_of(path)
    numbers = (at for at, key in enumerate(keys) if key.isdecimal())
    last = next(numbers, len(keys) - 2)
    return "/".join(keys[: last + 1]) or path


def _bars(changes: Iterable[tuple[str, str, float]]) -> list[ChangeBar]:
    ranked = sorted(changes, key=lambda change: -change[2])
    most = ranked[0][2] if ranked else 0.0
    return [
        ChangeBar(name, item, value, value / most if most else 0.0) for item, name, value in ranked
    ]
