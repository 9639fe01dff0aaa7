"""A pretrained model as the tree that another trainer stores: the inverse of its rules.

The leaves of the model lie between: the family's rules make boxes of them from the tensors of the
weights, and the inverse of the trainer's rules makes boxes of its leaves from these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.counts import count_text
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import leaf_shapes
from cairn.interop.conversion.boxes import Box, BoxReads, box_shape, element_count, whole_box
from cairn.interop.conversion.inverses import inverse
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.conversion.rules import Rule, RuleTable, match
from cairn.interop.errors import ConversionError, require_known
from cairn.interop.trainers.mapped_model import TRAINERS
from cairn.interop.weights.export import rule_table
from cairn.interop.weights.files import PretrainedWeights
from cairn.interop.weights.rule_slices import one_dtype
from cairn.interop.weights.weight_source import BoxSource
from cairn.storage.arrays.box_buffers import aligned_empty
from cairn.storage.arrays.boxes import fill
from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.arrays.plain_tree import LeafToWrite, write_plain_step

__all__ = ["TrainerStep", "writable_trainers", "write_trainer_step"]

_SHARD_BYTES: Final = 64 << 20
"""Bytes of a shard, where that makes no tensor be read twice."""


class TrainerStep(NamedTuple):
    """Step that was written for a trainer.

    Attributes:
        folder: folder of the step's item.
        settings: settings with which the trainer loads it, for people.
        assumed: what no config says and was assumed, for people.
    """

    folder: Path
    settings: str
    assumed: tuple[str, ...]


def writable_trainers() -> list[str]:
    """Return the names of the trainers for which steps can be written."""
    return sorted(trainer.name for trainer in TRAINERS if trainer.layout is not None)


def write_trainer_step(
    pretrained: PretrainedWeights,
    name: str,
    folder: Path,
    *,
    scan: bool,
    dtype: np.dtype[Any],
) -> TrainerStep:
    """Write a pretrained model as step 0 of a folder, in the form that a trainer restores.

    Tensors are read when they are needed, a few shards at a time. A shard has 64 MiB, or more
    where smaller ones would have tensors read twice: at most a layer's leaf, or a leaf that lies
    beside the layers.

    Args:
        pretrained: the model and its weights.
        name: name of the trainer.
        folder: folder on a local disk; created if needed.
        scan: stack the layers as the trainer's scan does.
        dtype: dtype of all leaves. Factors and offsets that the trainer keeps in its weights are
            computed in it; float32 gives 16-bit weights back bit for bit.

    Raises:
        ArgumentError: no steps can be written for a trainer of that name.
        ConversionError: the trainer has no such model; or tensors are missing, unexpected, of
            another shape or not floating; all are listed.
        StepExistsError: the folder has a step 0.
    """
    require_known("trainer", name, writable_trainers())
    (trainer,) = (entry for entry in TRAINERS if entry.name == name)
    config = pretrained.config
    if not isinstance(config, DecoderConfig) or trainer.layout is None:
        raise ConversionError(
            path=pretrained.path,
            expected="a decoder of a known family",
            found=type(config).__name__,
        )
    leaves = _leaves(pretrained, config, trainer.layout.rules(config, scan), dtype)
    items = write_plain_step(
        folder,
        0,
        trainer.layout.item,
        {f"{trainer.layout.root}{path}": leaf for path, leaf in leaves.items()},
    )
    settings = trainer.layout.settings(str(items), scan)
    return TrainerStep(items, settings, trainer.assumed(config, None))


def _leaves(
    pretrained: PretrainedWeights, config: DecoderConfig, table: RuleTable, dtype: np.dtype[Any]
) -> dict[str, LeafToWrite]:
    """Return the leaves of a trainer's tree, by their paths in the model's part of it."""
    shapes, weights = leaf_shapes(config), pretrained.weights
    match(table, leaves=shapes, path=f"{pretrained.path}: {config.model_type}")
    rules = match(
        pretrained.own_rules(shapes) or rule_table(config, shapes),
        leaves=shapes,
        tensors=weights.shapes,
        path=pretrained.path,
    )
    numbers = [
        f"{name}: {weights.dtypes[name]}"
        for rule in rules
        for name in rule.tensors
        if not is_floating(weights.dtypes[name])
    ]
    if numbers:
        raise ConversionError(
            path=pretrained.path,
            expected="floating weights",
            found=f"{count_text(len(numbers), 'tensor')} of other numbers",
            next_step="take the weights as they were before quantization",
            problems=numbers,
        )
    model = _ModelLeaves(weights, rules, shapes)
    leaves = {}
    for rule in table.rules:
        (path,) = rule.tensors
        (shape,) = rule.op.tensor_shapes([shapes[name] for name in rule.leaves])
        maker = _MadeLeaf(model, Rule(rule.tensors, rule.leaves, inverse(rule.op)), dtype)
        leaves[path] = LeafToWrite(shape, dtype, maker.shard(shape), maker.read)
    return leaves


class _ModelLeaves:
    """Leaves of a model, of which boxes are made from the tensors of its weights.

    Attributes:
        shapes: shapes of the leaves.
    """

    def __init__(
        self, weights: BoxSource, rules: Sequence[Rule], shapes: Mapping[str, Shape]
    ) -> None:
        """Create them without reading anything.

        Args:
            weights: source of the tensors.
            rules: rules that together make each leaf once.
            shapes: shapes of the leaves.
        """
        self.shapes = shapes
        self._weights = weights
        self._places = {name: (rule, at) for rule in rules for at, name in enumerate(rule.leaves)}

    def _reads(self, name: str, box: Box) -> tuple[Rule, BoxReads]:
        """Return the rule of a leaf, and the boxes of its tensors that make up a box."""
        rule, at = self._places[name]
        shapes = [self._weights.shapes[tensor] for tensor in rule.tensors]
        return rule, rule.op.box_reads(shapes, at, box)

    def cost(self, name: str, box: Box) -> int:
        """Return the number of elements that are read for a box of a leaf."""
        rule, part = self._reads(name, box)
        return sum(
            element_count(self._weights.cover(rule.tensors[tensor], inner))
            for tensor, inner in part.reads
        )

    def box(self, name: str, box: Box) -> Array:
        """Return a box of a leaf."""
        rule, part = self._reads(name, box)
        by_tensor: dict[int, list[int]] = {}
        for place, (tensor, _) in enumerate(part.reads):
            by_tensor.setdefault(tensor, []).append(place)
        arrays: dict[int, Array] = {}
        for tensor, places in by_tensor.items():
            boxes = [part.reads[place][1] for place in places]
            arrays |= zip(places, self._weights.boxes(rule.tensors[tensor], boxes), strict=True)
        values = [arrays[place] for place in range(len(part.reads))]
        if len({array.dtype for array in values}) > 1:
            values = [
                array.astype(one_dtype([other.dtype for other in values])) for array in values
            ]
        box_values: Array = part.make(values)
        return box_values


@dataclass(frozen=True)
class _MadeLeaf:
    """Leaf of a trainer that an operation makes of leaves of a model.

    Attributes:
        model: the model's leaves.
        rule: the rule from the model's leaves, as its tensors, to the trainer's.
        dtype: dtype of the trainer's leaf.
    """

    model: _ModelLeaves
    rule: Rule
    dtype: np.dtype[Any]

    def read(self, box: Box) -> Array:
        """Return a box of the leaf, in C order."""
        part = self._reads(box)
        arrays = []
        for number, inner in part.reads:
            values = self.model.box(self.rule.tensors[number], inner)
            arrays.append(values.astype(self.dtype, copy=False))
        (ordered,) = aligned_empty([box_shape(box)], self.dtype)
        fill(ordered, part.make(arrays))
        return ordered

    def shard(self, shape: Shape) -> Shape:
        """Return the shape of shards that are small where that makes no tensor be read twice."""
        shard = list(shape)
        for axis in range(len(shape)):
            parts = math.ceil(math.prod(shard) * self.dtype.itemsize / _SHARD_BYTES)
            if parts <= 1:
                break
            divisor = next(
                n for n in range(min(parts, shard[axis]), shard[axis] + 1) if shard[axis] % n == 0
            )
            smaller = [*shard[:axis], shard[axis] // divisor, *shard[axis + 1 :]]
            if self._cost(smaller) * divisor <= self._cost(shard):
                shard = smaller
        return tuple(shard)

    def _cost(self, shard: Sequence[int]) -> int:
        return sum(
            self.model.cost(self.rule.tensors[number], inner)
            for number, inner in self._reads(whole_box(shard)).reads
        )

    def _reads(self, box: Box) -> BoxReads:
        shapes = [self.model.shapes[name] for name in self.rule.tensors]
        return self.rule.op.box_reads(shapes, 0, box)
