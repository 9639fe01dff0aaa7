"""Export of a stored checkpoint to Hugging Face tensors, in blocks.

The manifest names the family and holds the model's config; the family's rule table maps leaves to
tensors. Leaves are read in blocks, so that peak memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from cairn.counts import count_text
from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import leaf_shapes
from cairn.interop.conversion.ops import Shape
from cairn.interop.conversion.rules import Rule, RuleTable, match
from cairn.interop.conversion.tensor_streams import float_dtype, streams
from cairn.interop.errors import ConversionError
from cairn.interop.families.family import get_family
from cairn.interop.trainers.mapped_model import TRAINERS, MappedModel, map_model
from cairn.interop.trainers.trainer import find_trees
from cairn.interop.weights.adapter_files import adapter_content, array_source
from cairn.interop.weights.mapped_leaves import by_stored_leaf, mapped_leaves
from cairn.interop.weights.peft_names import modules_of
from cairn.interop.weights.stored_leaves import ServedLeaf, adapters_of, served_leaves
from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.errors import TreeMismatchError
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.records.manifest import Manifest
from cairn.storage.safetensors.writer import TensorSource

MODEL_ITEM = "model"
MERGED_ITEM = "merged"
"""Name of the item that holds a model with its adapters merged."""


def export_sources(
    manifest: Manifest,
    reader: CheckpointReader,
    *,
    dtype: Any = None,
    mapped: MappedModel | None = None,
) -> tuple[list[TensorSource], dict[str, Any]]:
    """Return a stored model's tensors under Hugging Face's names, and its config.json.

    Adapters are merged and quantized weights dequantized. If the step was saved with
    `merge_lora=True`, the tensors are those of the merged model that it holds.

    Args:
        manifest: manifest of the step.
        reader: open reader of the step.
        dtype: dtype to which floating tensors are cast (a name or a NumPy dtype); None: the stored
            dtypes.
        mapped: the model that another trainer stored in the step; None: the step has one of ours.

    Returns:
        The tensors in writing order, and the content of config.json, without nulls.

    Raises:
        ConversionError: the step has no model; or leaves don't match the family's rules; or leaves
            of several dtypes become one tensor while `dtype` is None. All problems are listed.
        TreeMismatchError: the stored leaves are not those of the config; all are listed.
        ConfigError: the model's type is unknown, or the family can't express its options.
    """
    config, leaves, path = served_model(manifest, reader, mapped)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    rules: Sequence[Rule] = match(rule_table(config, shapes), leaves=shapes, path=path)
    if mapped is None:
        reader.expect(served_item(manifest.items), [name for rule in rules for name in rule.leaves])
    else:
        rules = by_stored_leaf(rules, mapped)
    target = float_dtype(dtype, argument="dtype")
    sources = streams(rules, leaves, dtype=target, path=path)
    return sources, hf_config(config, [source.dtype for source in sources])


def served_model(
    manifest: Manifest, reader: CheckpointReader, mapped: MappedModel | None = None
) -> tuple[EDPretrainedConfig, dict[str, ServedLeaf], str]:
    """Return the model of a step: its config, its served weights, and its origin for messages.

    Args:
        manifest: manifest of the step.
        reader: open reader of the step.
        mapped: the model that another trainer stored in the step; None: the step has one of ours.

    Raises:
        ConversionError: the step has no model.
        ConfigError: the model's type is unknown.
        TreeMismatchError: the stored leaves are not those that the config describes; all are
            listed.
    """
    if mapped is not None:
        named = f"step {manifest.step}, {mapped.tree.item} of {mapped.tree.trainer.name}"
        return mapped.config, mapped_leaves(reader, mapped), named
    config = stored_config(manifest)
    item = served_item(manifest.items)
    # Keys and counts of random streams are no weights.
    records = reader.contents.leaves if reader.contents is not None else ()
    own = [record for record in records if record.item == item]
    keys = {record.path for record in own if record.dtype.startswith("key<")}
    counts = {f"{path.removesuffix('key')}count" for path in keys if path.endswith("/key")}
    random = keys | counts
    infos = {path: info for path, info in reader.leaves(item).items() if path not in random}
    leaves = served_leaves(reader, item, infos)
    if isinstance(config, DecoderConfig):
        shapes = {path: leaf.shape for path, leaf in leaves.items()}
        _check_leaves(leaf_shapes(config), shapes, path=f"{reader.uri}: {item}")
    return config, leaves, f"step {manifest.step}, {item}"


def adapter_sources(
    manifest: Manifest, reader: CheckpointReader, *, dtype: Any = None
) -> tuple[list[TensorSource], dict[str, Any]]:
    """Return the adapters of a stored model under PEFT's names, and adapter_config.json.

    The adapters, which are small, are held in memory.

    Args:
        manifest: manifest of the step.
        reader: open reader of the step.
        dtype: dtype to which they are cast (a name or a NumPy dtype); None: the stored dtypes.

    Raises:
        ConversionError: the step has no model of a known family, or the model has no adapters; or
            some adapters have no module in the family, and all of these are listed.
    """
    config = stored_config(manifest)
    path = f"step {manifest.step}"
    infos = reader.leaves(MODEL_ITEM)
    adapters = adapters_of(reader, MODEL_ITEM, infos)
    if adapters is None or not adapters.pairs:
        raise ConversionError(
            path=path,
            expected="a model with adapters, of which a PEFT folder is made",
            found="a model without",
            next_step="leave lora='keep' out",
        )
    leaves = served_leaves(reader, MODEL_ITEM, infos)  # raises if A or B of a pair is missing
    kernels = {name: leaf.shape for name, leaf in leaves.items() if name.endswith("/kernel")}
    tensors, content = adapter_content(
        modules_of(config, kernels, path=path),
        adapters.pairs.keys(),
        lambda kernel: adapters.pair(kernel),
        rank=adapters.rank,
        alpha=adapters.alpha,
        task_type="CAUSAL_LM",
        base_model_name_or_path=None,
        path=path,
    )
    target = float_dtype(dtype, argument="dtype")
    return [array_source(name, array, dtype=target) for name, array in tensors.items()], content


def served_item(items: Collection[str]) -> str:
    """Return the name of the item to export: the merged model if there is one."""
    return MERGED_ITEM if MERGED_ITEM in items else MODEL_ITEM


def _check_leaves(described: dict[str, Shape], stored: dict[str, Shape], *, path: str) -> None:
    problems = [
        f"{leaf}: missing from the checkpoint, expected shape {list(described[leaf])}"
        for leaf in described.keys() - stored.keys()
    ]
    problems += [
        f"{leaf}: unexpected in the checkpoint, stored with shape {list(stored[leaf])}"
        for leaf in stored.keys() - described.keys()
    ]
    problems += [
        f"{leaf}: expected shape {list(described[leaf])}, stored with {list(stored[leaf])}"
        for leaf in described.keys() & stored.keys()
        if described[leaf] != stored[leaf]
    ]
    if problems:
        raise TreeMismatchError(
            "the checkpoint does not fit its config",
            path=path,
            expected=f"the {count_text(len(described), 'leaf')} that the stored config describes",
            found=count_text(len(problems), "that differs", "that differ"),
            next_step="Save the model with the config that it was built from.",
            problems=sorted(problems),
        )


def stored_config(manifest: Manifest) -> EDPretrainedConfig:
    """Return the config of the model that a step holds.

    Raises:
        ConversionError: the step's manifest describes no model.
        ConfigError: the model's type is unknown.
    """
    if manifest.model is None or MODEL_ITEM not in manifest.items:
        has_item = MODEL_ITEM in manifest.items
        raise ConversionError(
            path=f"step {manifest.step}",
            expected="a model config" if has_item else "an item 'model' with its config",
            found="an item 'model' that was saved without one"
            if has_item
            else f"the items {', '.join(manifest.items)}",
            next_step="save a model that has a `config` with EasyDeLState.save_state, or write the "
            "tensors to one file with `cairn gather`"
            if manifest.plain is None
            else "adopt the folder into another run, with a config and a map of its leaves",
        )
    return AutoEasyDeLConfig.from_dict(
        {"model_type": manifest.model.model_type, **manifest.model.config}
    )


def mapped_model(
    manifest: Manifest, described: Mapping[str, Any] | None, *, looked_at: str = ""
) -> MappedModel | None:
    """Return the model that another trainer stored in an imported step; None if it has one of ours.

    Args:
        manifest: manifest of the step.
        described: a config.json or the trainer's settings; None: none.
        looked_at: where a config was looked for, for the error that there is none.

    Raises:
        ConversionError, ConfigError: as `map_model`.
    """
    if manifest.plain is None or manifest.model is not None:
        return None
    items = _shapes(manifest)
    return map_model(items, described, path=f"step {manifest.step}", looked_at=looked_at)


def trainer_of(manifest: Manifest) -> str | None:
    """Return the name of the trainer whose one model a step without a config of its own holds.

    Without the model's config nothing tells yet that the model can be exported. None: the step has
    a config, or no tree of a known trainer, or several.

    Args:
        manifest: manifest of the step.
    """
    if manifest.plain is None or manifest.model is not None:
        return None
    trees = find_trees(TRAINERS, _shapes(manifest))
    return trees[0].trainer.name if len(trees) == 1 else None


def _shapes(manifest: Manifest) -> dict[str, dict[str, Shape]]:
    items: dict[str, dict[str, Shape]] = {}
    for record in manifest.inline_leaves:
        items.setdefault(record.item, {})[record.path] = tuple(record.shape)
    return items


def rule_table(config: EDPretrainedConfig, shapes: dict[str, Shape]) -> RuleTable:
    """Return the rule table between our leaves and the exported tensors.

    A family has its own table. The leaves of another model class are exported unchanged, under
    their paths with dots for slashes.
    """
    if isinstance(config, DecoderConfig):
        return get_family(config.model_type).rules(config)
    return RuleTable(tuple(Rule.one(path, path.replace("/", ".")) for path in shapes))


def hf_config(config: EDPretrainedConfig, dtypes: list[np.dtype[Any]]) -> dict[str, Any]:
    """Return the config.json of an export whose tensors have these dtypes."""
    floating = [dtype.name for dtype in dtypes if is_floating(dtype)]
    data = config.to_hf()
    # A class of no family may have a field of that name with another meaning.
    if floating and not hasattr(config, "dtype"):
        data["dtype"] = max(dict.fromkeys(floating), key=floating.count)
    return data
