"""How much layers and tensors changed from one step to another, as bars; pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cairn.service.schemas import LeafDifference
from cairn.storage.arrays import keys_of


@dataclass(frozen=True)
class ChangeBar:
    """How much a leaf, or a layer, changed.

    Attributes:
        name: Its path.
        item: That it is of.
        relative: Norm of the difference by that of this step's elements.
        share: Of the largest one among those that are shown.
    """

    name: str
    item: str
    relative: float
    share: float


def bars_of(differences: Sequence[LeafDifference]) -> list[ChangeBar]:
    """Leaves whose values were compared, those that changed most first."""
    return _bars(
        (one.item, one.path, one.values.relative)
        for one in differences
        if one.values is not None and one.values.relative is not None
    )


def layers_of(differences: Sequence[LeafDifference]) -> list[ChangeBar]:
    """Layers, those that changed most first: of each the leaves whose values differ, together."""
    squares: dict[tuple[str, str], tuple[float, float]] = {}
    for one in differences:
        values = one.values
        if values is None or not values.relative or not isinstance(values.norm, float):
            continue
        key = (one.item, layer_of(one.path))
        changed, whole = squares.get(key, (0.0, 0.0))
        norm = values.norm / values.relative
        squares[key] = (changed + values.norm**2, whole + norm**2)
    return _bars(
        (item, layer, math.sqrt(changed / whole))
        for (item, layer), (changed, whole) in squares.items()
        if whole > 0 and math.isfinite(changed) and math.isfinite(whole)
    )


def layer_of(path: str) -> str:
    """The layer of a leaf: down to the first number of its path, or else to its module."""
    keys = keys_of(path)
    numbers = (at for at, key in enumerate(keys) if key.isdecimal())
    last = next(numbers, len(keys) - 2)
    return "/".join(keys[: last + 1]) or path


def _bars(found: Iterable[tuple[str, str, float]]) -> list[ChangeBar]:
    known = sorted(found, key=lambda one: -one[2])
    most = known[0][2] if known else 0.0
    return [
        ChangeBar(name, item, value, value / most if most else 0.0) for item, name, value in known
    ]
