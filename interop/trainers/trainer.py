"""Description of a trainer, and the model's part of a tree that it stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.ops import Shape
from cairn.interop.conversion.rules import RuleTable

__all__ = [
    "OPTIMIZER_PARTS",
    "HeadRounding",
    "Reading",
    "Trainer",
    "TrainerTree",
    "TreeLayout",
    "find_trees",
]

OPTIMIZER_PARTS = frozenset({"opt_state", "optimizer", "optimizer_state", "mu", "nu", "ema"})
"""Parts of paths below which copies of a model's tree lie that are no model."""


@dataclass(frozen=True)
class TrainerTree:
    """Model's part of a stored tree.

    Attributes:
        trainer: the trainer that stores such trees.
        item: item of the step.
        root: what the paths of the model's leaves begin with, "" or with a slash at its end.
        shapes: shapes of the leaves below it, by the rest of their paths.
        left_out: paths of the item's other leaves.
    """

    trainer: Trainer
    item: str
    root: str
    shapes: Mapping[str, Shape]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """How a tree was read, beside its model's config.

    Attributes:
        sizes: keys of config.json that the tree itself tells.
        layout: the tree's layout, for people.
        model_types: families whose models have such leaves, the likeliest first.
    """

    sizes: Mapping[str, Any]
    layout: str
    model_types: tuple[str, ...]


class HeadRounding(NamedTuple):
    """Rounding of the embedding, where it is a tied head, in a trainer's forward pass.

    Attributes:
        dtype: the dtype that it is rounded to, whatever the model's dtype is.
        factor: factor that the trainer's stored embedding has beside that of a config.json's model.
    """

    dtype: str
    factor: float


class TreeLayout(NamedTuple):
    """Form in which a trainer would store a model.

    Attributes:
        item: item of the step.
        root: what the paths of the model's leaves begin with.
        rules: function (config, scan) -> rules between the tree's leaves, as tensors, and ours;
            with `scan`, layers are stacked. It raises ConversionError for a model that the trainer
            lacks.
        settings: function (folder of the item, scan) -> settings with which the trainer loads it,
            for people.
    """

    item: str
    root: str
    rules: Callable[[DecoderConfig, bool], RuleTable]
    settings: Callable[[str, bool], str]


@dataclass(frozen=True)
class Trainer:
    """A trainer whose trees are known.

    Attributes:
        name: name of the trainer.
        embedding: path of the embedding below the model's root, by which a tree is recognised.
        read: function from the shapes of a tree to its `Reading`; it raises ConversionError for a
            tree of another form.
        rules: function (config, shapes, pairs) -> rules between the tree's leaves, as tensors, and
            ours. `pairs`: neighbouring dimensions of a head turn together; None: as usual for the
            family.
        tied_head: function (config) -> how the trainer's forward pass rounds the embedding where it
            is a tied head; None: it reads it as it is stored.
        assumed: function (config, pairs) -> what was assumed and no shape shows, for people.
        layout: the form in which it would store a model; None: its trees are only read.
    """

    name: str
    embedding: str
    read: Callable[[Mapping[str, Shape]], Reading]
    rules: Callable[[DecoderConfig, Mapping[str, Shape], bool | None], RuleTable]
    assumed: Callable[[DecoderConfig, bool | None], tuple[str, ...]]
    tied_head: Callable[[DecoderConfig], HeadRounding] | None = None
    layout: TreeLayout | None = None


def find_trees(
    trainers: Iterable[Trainer], items: Mapping[str, Mapping[str, Shape]]
) -> list[TrainerTree]:
    """Return the models that known trainers stored in a step.

    Args:
        trainers: the known trainers.
        items: item -> path -> shape of each stored leaf.
    """
    trees = []
    for trainer in trainers:
        for item, shapes in items.items():
            for path in shapes:
                root = path.removesuffix(trainer.embedding)
                if root == path or (root and not root.endswith("/")):
                    continue
                if OPTIMIZER_PARTS & {*root.split("/")}:
                    continue
                inside = {}
                for name, shape in shapes.items():
                    below = name.removeprefix(root)
                    if name.startswith(root) and below.split("/")[0] not in OPTIMIZER_PARTS:
                        inside[below] = shape
                left = tuple(name for name in shapes if name.removeprefix(root) not in inside)
                trees.append(TrainerTree(trainer, item, root, inside, left))
    return trees
