"""Curves of metrics: exponential smoothing, and fewer points for the browser. Pure."""

from collections.abc import Sequence
from typing import Final

MAX_CURVES: Final = 20
MAX_POINTS: Final = 2000


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average of a curve, corrected for its start.

    Each point is the mean of all before it and itself, where a point counts `weight` times as much
    as the one after it.

    Args:
        values: Finite values of the curve.
        weight: From 0 (the values as they are) to below 1.

    Source: bias correction as in Adam, https://arxiv.org/abs/1412.6980, section 3.
    """
    total = norm = 0.0
    smoothed = []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed


def sample_extremes(values: Sequence[float], most: int) -> list[int]:
    """Choose the points of a curve to draw: the smallest and the largest of equal buckets.

    A spike stays visible however many points there are. The first and the last point are always
    among them.

    Args:
        values: Finite values of the curve.
        most: Largest number of points; at least 4.

    Returns:
        Positions of the points, in ascending order; all of them, if there are at most `most`.

    Source: min-max aggregation, in U. Jugel, Z. Jerzak, G. Hackenbroich, V. Markl: "M4: A
    Visualization-Oriented Time Series Data Aggregation", PVLDB 7(10), 2014, section 4.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    buckets = (most - 2) // 2
    chosen = {0, count - 1}
    for bucket in range(buckets):
        positions = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        chosen.add(min(positions, key=values.__getitem__))
        chosen.add(max(positions, key=values.__getitem__))
    return sorted(chosen)
