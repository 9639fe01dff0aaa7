"""A known model in a step that another trainer stored: its config, and where its leaves are.

The tree says which trainer wrote it and how large the model is. What no shape shows (the base of
rotary positions, an epsilon, a window) has to be said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cairn.counts import count_text
from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import leaf_shapes
from cairn.interop.conversion.ops import Shape
from cairn.interop.conversion.rules import Rule, match
from cairn.interop.errors import ConversionError
from cairn.interop.trainers import maxtext, tunix
from cairn.interop.trainers.maxtext_settings import from_maxtext, is_maxtext, sizes_in
from cairn.interop.trainers.trainer import HeadRounding, TrainerTree, find_trees

__all__ = ["TRAINERS", "MappedModel", "map_model"]

TRAINERS: Final = (maxtext.TRAINER, tunix.TRAINER)
"""The trainers whose trees are known."""

_NEEDED: Final = ("model_type", "max_position_embeddings", "rms_norm_eps", "rope_theta")
_NEEDED_BY_FAMILY: Final = {
    "gemma2": ("sliding_window", "query_pre_attn_scalar"),
    "gemma3_text": ("sliding_window", "query_pre_attn_scalar", "rope_local_base_freq"),
    "mixtral": ("num_experts_per_tok",),
    "qwen3_moe": ("num_experts_per_tok", "norm_topk_prob"),
}
_BY_ROPE_PARAMETERS: Final = frozenset({"rope_theta", "rope_local_base_freq"})
_SHOWN: Final = 8


@dataclass(frozen=True)
class MappedModel:
    """A model, and the rules between its leaves and those of a trainer's tree.

    Attributes:
        tree: the trainer's tree.
        config: config of the model.
        rules: rules that together read each leaf of the tree once, and make each leaf of the model
            once.
        layout: how the tree was taken, for people.
        left_out: what of the item is not exported, for people.
        assumed: what no shape shows and was assumed, for people.
    """

    tree: TrainerTree
    config: DecoderConfig
    rules: tuple[Rule, ...]
    layout: str
    left_out: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def head_rounding(self) -> HeadRounding | None:
        """Rounding of a tied head in the trainer's forward pass; None: it is not rounded."""
        rounding = self.tree.trainer.tied_head
        return (
            None
            if rounding is None or not self.config.tie_word_embeddings
            else rounding(self.config)
        )


def map_model(
    items: Mapping[str, Mapping[str, Shape]],
    described: Mapping[str, Any] | None,
    *,
    path: str,
    looked_at: str = "",
) -> MappedModel:
    """Return the model that a known trainer stored in a step.

    Args:
        items: item -> path -> shape of each stored leaf.
        described: a config.json, or MaxText's settings; keys for sizes may be left out. None: none.
        path: name of the step in errors.
        looked_at: where a config was looked for, for the error that there is none.

    Raises:
        ConversionError: no known trainer's tree, or several; keys of the config are missing, and
            all are named; or leaves do not fit the config, and all are listed.
        ConfigError: the config is of an unknown family, or inconsistent.
    """
    trees = find_trees(TRAINERS, items)
    if len(trees) != 1:
        raise _not_one(trees, items, path)
    (tree,) = trees
    reading = tree.trainer.read(tree.shapes)
    pairs: bool | None = None
    keys = dict(described or {})
    if is_maxtext(keys):
        _refuse_other_sizes(sizes_in(keys), reading.sizes, path)
        keys, pairs = from_maxtext(keys)
    _require_keys(keys, reading.model_types, reading.sizes, tree, path, looked_at)
    config = AutoEasyDeLConfig.from_hf({**reading.sizes, **keys})
    if not isinstance(config, DecoderConfig):
        raise ConversionError(
            path=path,
            expected=f"a config of one of {', '.join(reading.model_types)}",
            found=type(config).__name__,
        )
    table = tree.trainer.rules(config, tree.shapes, pairs)
    leaves = leaf_shapes(config)
    rules = match(
        table,
        leaves=leaves,
        tensors=tree.shapes,
        path=f"{path}: {tree.trainer.name}, {config.model_type}",
        next_step=f"give the config of this model: its leaves look like those of "
        f"{' or '.join(reading.model_types)}, {reading.layout}",
    )
    return MappedModel(
        tree,
        config,
        rules,
        f"{tree.trainer.name}, {reading.layout}, {config.model_type}",
        _left_out(tree, items, config),
        tree.trainer.assumed(config, pairs),
    )


def _refuse_other_sizes(said: Mapping[str, int], stored: Mapping[str, Any], path: str) -> None:
    """Raise ConversionError if a trainer's settings are of a model of other sizes."""
    problems = [
        f"{key}: stored {stored[key]}, in the settings {size}"
        for key, size in said.items()
        if key in stored and stored[key] != size
    ]
    if problems:
        raise ConversionError(
            path=path,
            expected="the settings of the model that is stored",
            found=f"{count_text(len(problems), 'size')} of another",
            next_step="give the file that the run was started with, sizes that were set on its "
            "command line included",
            problems=problems,
        )


def _require_keys(
    keys: Mapping[str, Any],
    model_types: tuple[str, ...],
    sizes: Mapping[str, Any],
    tree: TrainerTree,
    path: str,
    looked_at: str,
) -> None:
    """Raise ConversionError unless the keys are there whose defaults would be guesses."""
    family = str(keys.get("model_type", model_types[0]))
    needed = [*_NEEDED, *_NEEDED_BY_FAMILY.get(family, ())]
    missing = [
        key
        for key in needed
        if keys.get(key) is None
        and not (key in _BY_ROPE_PARAMETERS and keys.get("rope_parameters"))
    ]
    if not missing:
        return
    told = ", ".join(f"{key} {value}" for key, value in sizes.items())
    raise ConversionError(
        path=f"{path}: {tree.trainer.name}",
        expected=f"a config with {', '.join(missing)}",
        found=f"none of them{f' in {looked_at}' if looked_at else ''}",
        next_step="give the trainer's config file or a config.json that has them, with --config "
        f"FILE. model_type is {' or '.join(model_types)}; the tree itself tells {told}",
    )


def _left_out(
    tree: TrainerTree, items: Mapping[str, Mapping[str, Shape]], config: DecoderConfig
) -> tuple[str, ...]:
    """Return a line for each part of the step that is not exported."""
    counts: dict[str, int] = {}
    for name in tree.left_out:
        first = name.split("/")[0]
        counts[first] = counts.get(first, 0) + 1
    lines = [
        f"{tree.item}/{name}: {count_text(count, 'leaf')}" for name, count in sorted(counts.items())
    ]
    lines += [
        f"{item}: {count_text(len(shapes), 'leaf')}"
        for item, shapes in items.items()
        if item != tree.item
    ]
    rows = tree.shapes[tree.trainer.embedding][0]
    if rows > config.vocab_size:
        lines.append(f"rows {config.vocab_size} to {rows - 1} of the vocabulary")
    return tuple(lines)


def _not_one(
    trees: list[TrainerTree], items: Mapping[str, Mapping[str, Shape]], path: str
) -> ConversionError:
    if trees:
        places = ", ".join(f"{tree.item}/{tree.root} ({tree.trainer.name})" for tree in trees)
        return ConversionError(
            path=path,
            expected="one model",
            found=places,
            next_step="adopt the folder with a config and a map of one model's leaves",
        )
    names = [f"{item}/{name}" for item, shapes in items.items() for name in sorted(shapes)]
    more = ", …" if len(names) > _SHOWN else ""
    looks = ", ".join(f"{trainer.name} (…{trainer.embedding})" for trainer in TRAINERS)
    return ConversionError(
        path=path,
        expected=f"an item 'model', or the tree of a known trainer: {looks}",
        found=f"{', '.join(names[:_SHOWN])}{more}" or "no leaves",
        next_step="adopt the folder into another run, with a config and a map of its leaves",
    )
