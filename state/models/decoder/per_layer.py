"""Values and layers for a scan, in which one trace of a block serves many layers."""

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
    """A few different values, one of which belongs to each layer.

    Attributes:
        values: pytrees of arrays with equal structures and shapes; a single value may be anything.
        which: for each layer, the index of its value.
    """

    values: tuple[Any, ...]
    which: tuple[int, ...]

    def of(self, layer: int | jax.Array) -> Any:
        """Return a layer's value; if the layer number is traced, it is selected at run time."""
        if len(self.values) == 1:
            return self.values[0]
        if isinstance(layer, int):
            return self.values[self.which[layer]]
        number = jnp.asarray(self.which, jnp.int32)[layer]
        return jax.tree.map(lambda *parts: jnp.stack(parts)[number], *self.values)


def make_per_layer(keys: Sequence[Any], values: dict[Any, Any]) -> PerLayer:
    """Return the values of layers.

    Args:
        keys: for each layer, the key of its value.
        values: the values, by key; values that no layer uses are left out.
    """
    used = list(dict.fromkeys(keys))
    return PerLayer(tuple(values[key] for key in used), tuple(used.index(key) for key in keys))


@dataclass(frozen=True)
class Run:
    """Consecutive layers for one scan: a sequence of structures (a turn) that repeats.

    Attributes:
        first: number of the run's first layer.
        graphdefs: graphdefs of the layers of a turn.
        by_place: for each place in the turn, the layers at that place in all turns, in order.
    """

    first: int
    graphdefs: tuple[Any, ...]
    by_place: tuple[tuple[Any, ...], ...]

    @property
    def firsts(self) -> list[int]:
        """Number of the first layer of each turn."""
        turn = len(self.graphdefs)
        return [self.first + turn * number for number in range(len(self.by_place[0]))]


def find_runs(graphdefs: list[Any], layers: list[Any]) -> list[Run]:
    """Divide layers into runs, each as long as possible.

    Args:
        graphdefs: graphdef of each layer.
        layers: the layers.
    """
    runs: list[Run] = []
    first = 0
    while first < len(layers):
        turn, count = 1, 1
        for length in range(1, min(_LONGEST_TURN, len(layers) - first) + 1):
            repeated, repeats = graphdefs[first : first + length], 1
            while graphdefs[first + repeats * length : first + (repeats + 1) * length] == repeated:
                repeats += 1
            if (repeats > 1 and repeats * length > turn * count) or length == 1:
                turn, count = length, repeats
        places = range(first, first + turn)
        stop = first + turn * count
        by_place = tuple(tuple(layers[place:stop:turn]) for place in places)
        runs.append(Run(first, tuple(graphdefs[first : first + turn]), by_place))
        first = stop
    return runs
