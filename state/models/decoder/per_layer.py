"""Values that differ from layer to layer, for a block that is traced once for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["PerLayer", "Run", "find_runs", "make_per_layer"]

_LONGEST_TURN = 16


@dataclass(frozen=True)
class PerLayer:
    """A few values, of which each layer has one.

    Attributes:
        values: pytrees of arrays, alike in shape; without arrays if there is but one.
        which: for each layer the number of its value.
    """

    values: tuple[Any, ...]
    which: tuple[int, ...]

    def of(self, layer: int | jax.Array) -> Any:
        """Return the value of a layer; for a traced layer number it is chosen at run time."""
        if len(self.values) == 1:
            return self.values[0]
        if isinstance(layer, int):
            return self.values[self.which[layer]]
        number = jnp.asarray(self.which, jnp.int32)[layer]
        return jax.tree.map(lambda *parts: jnp.stack(parts)[number], *self.values)


def make_per_layer(keys: Sequence[Any], values: dict[Any, Any]) -> PerLayer:
    """Return the layers' values, looked up by their keys.

    Args:
        keys: of each layer.
        values: by key; those that no layer has are left out.
    """
    used = list(dict.fromkeys(keys))
    return PerLayer(tuple(values[key] for key in used), tuple(used.index(key) for key in keys))


@dataclass(frozen=True)
class Run:
    """Layers that repeat in turns: what one scan goes through.

    Attributes:
        first: number of the first layer.
        graphdefs: of the layers of one turn.
        by_place: for each place in the turn the layers that stand there, in order.
    """

    first: int
    graphdefs: tuple[Any, ...]
    by_place: tuple[tuple[Any, ...], ...]

    @property
    def firsts(self) -> list[int]:
        """The number of the first layer of each turn."""
        turn = len(self.graphdefs)
        return [self.first + turn * number for number in range(len(self.by_place[0]))]


def find_runs(graphdefs: Sequence[Any], layers: Sequence[Any]) -> list[Run]:
    """Return the layers as runs, each as long as can be: alike one by one, or turn by turn."""
    runs: list[Run] = []
    first = 0
    while first < len(layers):
        turn, count = 1, 1
        for length in range(1, min(_LONGEST_TURN, len(layers) - first) + 1):
            repeats = _repeats(graphdefs, first, length)
            if (repeats > 1 and repeats * length > turn * count) or length == 1:
                turn, count = length, repeats
        places = range(first, first + turn)
        stop = first + turn * count
        by_place = tuple(tuple(layers[place:stop:turn]) for place in places)
        runs.append(Run(first, tuple(graphdefs[first : first + turn]), by_place))
        first = stop
    return runs


def _repeats(graphdefs: Sequence[Any], first: int, length: int) -> int:
    """Return how often the `length` layers from `first` on repeat in a row."""
    turn, count = list(graphdefs[first : first + length]), 1
    while list(graphdefs[first + count * length : first + (count + 1) * length]) == turn:
        count += 1
    return count
