"""Writes a model in memory as a Hugging Face folder, in any store."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from state.errors import ConversionError
from state.export import hf_config, rule_table
from state.gather import gather_leaf
from state.paths import named_leaves
from state.tensor_streams import MemoryLeaf, float_dtype, streams
from state.weight_files import CONFIG_FILE, INDEX_FILE
from state.weight_ops import Array
from state.weight_rules import Rule, RuleTable, match
from storage.files import Files
from storage.safetensors_stream import TensorSource, plan_shards, write_index, write_shard
from storage.uri import StoreURI, parse_uri

if TYPE_CHECKING:
    from state.base_module import EasyDeLBaseModule


class _Weights:
    """A model's weights by path; fetched to the host when read, or before, in one order."""

    def __init__(self, model: EasyDeLBaseModule) -> None:
        params = nnx.state(model, nnx.Param)
        self.arrays: dict[str, jax.Array] = {n.path: n.leaf for n in named_leaves(params)}
        self.fetched: dict[str, Array] = {}

    def fetch(self, path: str) -> Array:
        ready = self.fetched.get(path)
        return np.asarray(gather_leaf(self.arrays[path])) if ready is None else ready

    def leaf(self, path: str) -> MemoryLeaf:
        array = self.arrays[path]
        return MemoryLeaf(tuple(array.shape), np.dtype(array.dtype), lambda: self.fetch(path))


def model_streams(
    model: EasyDeLBaseModule, *, float_dtype_name: Any = None
) -> tuple[RuleTable, list[TensorSource]]:
    """A model's weights under Hugging Face's names, and the table that they went by.

    Raises:
        ConversionError: weights that the family's rules don't know, adapters for instance.
    """
    table, _, sources = _streams(model, _Weights(model), float_dtype_name)
    return table, sources


def write_folder(
    model: EasyDeLBaseModule,
    save_directory: str | os.PathLike[str] | StoreURI,
    max_shard_size: int | str,
    *,
    float_dtype: Any,
) -> list[str]:
    """Weights first, config.json last, so that a folder that has it is complete.

    Raises:
        ConversionError: weights that the family's rules don't know.
        ConfigError: the family can't express the model's options.
        StorageError: the store refuses.
    """
    weights = _Weights(model)
    _, rules, sources = _streams(model, weights, float_dtype)
    config = hf_config(model.config, [source.dtype for source in sources])
    shards = plan_shards(sources, max_shard_size)
    files = Files.open(parse_uri(save_directory))
    leaves_of = {name: rule.ours for rule in rules for name in rule.theirs}
    writes = jax.process_index() == 0
    for shard in shards:
        if jax.process_count() > 1:
            # Gathering is collective: every process does it, in one order, outside of threads.
            paths = dict.fromkeys(p for t in shard.tensors for p in leaves_of[t.name])
            weights.fetched = {path: weights.fetch(path) for path in paths}
        if writes:
            write_shard(files, shard.file_name, shard)
    small: dict[str, bytes] = dict(model.config.tokenizer_files)
    small[CONFIG_FILE] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    written = [shard.file_name for shard in shards]
    if len(shards) > 1:
        written.append(INDEX_FILE)
    if writes:
        if len(shards) > 1:
            write_index(files, INDEX_FILE, shards)
        _remove_stale(files, keep={*written})
        _write_small(files, small)
    return [*written, *small]


def _streams(
    model: EasyDeLBaseModule, weights: _Weights, dtype: Any
) -> tuple[RuleTable, tuple[Rule, ...], list[TensorSource]]:
    shapes = {path: tuple(array.shape) for path, array in weights.arrays.items()}
    table = rule_table(model.config, shapes)
    rules = match(table, ours=shapes, path=type(model).__name__)
    leaves = {path: weights.leaf(path) for path in shapes}
    made = streams(rules, leaves, dtype=float_dtype(dtype, argument="float_dtype"))
    return table, rules, made


def _remove_stale(files: Files, *, keep: set[str]) -> None:
    """Weights of an earlier save, which readers would mix with these."""
    for entry in files.list(""):
        weights = entry.name.startswith("model") and entry.name.endswith(".safetensors")
        if (weights or entry.name == INDEX_FILE) and entry.name not in keep:
            files.delete_tree(entry.name)


def _write_small(files: Files, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        if "/" in name or name.startswith("."):
            raise ConversionError(
                path="tokenizer_files", expected="plain file names", found=repr(name)
            )
        with files.open_write(name) as sink:
            sink.write(content)
