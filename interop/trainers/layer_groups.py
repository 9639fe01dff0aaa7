"""Rules between a trainer's layers and ours, whether each is stored by itself or all in one array.

A trainer's table says of each of our leaves its name in a layer and the operations on it. A
`LayerGroup` says where layers lie: one of them, or several that a scan stacks in one array. Every
k-th layer of another kind is a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import Layer, LayerKind, block_layers
from cairn.interop.conversion.layout_ops import Merge, Pad, Unstack
from cairn.interop.conversion.ops import RENAME, TRANSPOSE, Chain, Op, RotaryRows, Shape
from cairn.interop.conversion.rules import Rule

__all__ = ["LayerGroup", "StoredLeaf", "chained", "group_rules", "head_ops", "padded", "scan_axis"]


class StoredLeaf(NamedTuple):
    """Leaf of a layer in a trainer's tree.

    Attributes:
        names: our leaves that it becomes, by their paths in a layer.
        path: its path in the trainer's layer.
        ops: operations from it to ours.
    """

    names: tuple[str, ...]
    path: str
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one place in a trainer's tree.

    Attributes:
        prefix: path of the place.
        numbers: numbers of the layers, in the order in which a scan stacks them.
        axis: axis that counts them; None: one layer that is stored by itself.
        suffix: what the first part of each path in the layer has at its end.
    """

    prefix: str
    numbers: tuple[int, ...]
    axis: int | None = None
    suffix: str = ""

    def path(self, inner: str) -> str:
        """Return the whole path of a leaf of the layer."""
        first, *rest = inner.split("/")
        return "/".join((self.prefix, f"{first}{self.suffix}", *rest))


def group_rules(groups: Iterable[LayerGroup], leaves: Iterable[StoredLeaf]) -> list[Rule]:
    """Return the rules of all layers, those of one stored leaf together.

    Args:
        groups: where the layers lie.
        leaves: the leaves of a layer, the same in each group.
    """
    listed = [*leaves]
    rules = []
    for group in groups:
        for leaf in listed:
            ops = leaf.ops
            if group.axis is not None:
                ops = (Unstack(len(group.numbers), group.axis), *ops)
            ours = tuple(
                f"model/layers/{number}/{name}" for number in group.numbers for name in leaf.names
            )
            rules.append(Rule(ours, (group.path(leaf.path),), chained(ops)))
    return rules


def chained(ops: tuple[Op, ...]) -> Op:
    """Return the operations as one."""
    if not ops:
        return RENAME
    return ops[0] if len(ops) == 1 else Chain(ops)


def head_ops(
    config: DecoderConfig, heads: int, *, axis: int, pairs: bool = False
) -> tuple[Op, ...]:
    """Return the operations on a leaf whose heads are an axis of their own.

    Args:
        config: config of the model.
        heads: number of heads.
        axis: the heads' axis in the stored leaf; their size is the next one.
        pairs: neighbouring dimensions of a head turn together, not those of its two halves.
    """
    merge = Merge((heads, config.head_size), axis)
    if not pairs:
        return (merge,)
    rows = RotaryRows(heads)
    return (merge, rows) if axis == 0 else (merge, TRANSPOSE, rows, TRANSPOSE)


def padded(rows: int, stored: Shape | None, axis: int = 0) -> tuple[Op, ...]:
    """Return the operation that takes a vocabulary's rows from one that is rounded up."""
    if stored is None or len(stored) <= axis or stored[axis] <= rows:
        return ()
    return (Pad(rows, stored[axis], axis),)


def scan_axis(shape: Shape, inner: Shape) -> int | None:
    """Return the axis by which a stacked leaf exceeds a layer's leaf; None: none fits.

    If two do, as where a layer is as wide as there are layers, it is axis 1, then 0.
    """
    for axis in (1, 0, 2, 3):
        if axis < len(shape) and (*shape[:axis], *shape[axis + 1 :]) == inner:
            return axis
    return None


def norms_of(config: DecoderConfig) -> Mapping[str, Layer]:
    """Return the norms of the first layer, by their paths in it."""
    layers = block_layers(config, 0)
    return {path: layer for path, layer in layers.items() if layer.kind is LayerKind.NORM}
