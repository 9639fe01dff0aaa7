"""Write of a model in memory as a Hugging Face folder, in any store."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from cairn.interop.conversion.ops import Array
from cairn.interop.conversion.rules import Rule, RuleTable, match
from cairn.interop.conversion.tensor_streams import MemoryLeaf, float_dtype, streams
from cairn.interop.errors import ConversionError
from cairn.interop.weights.export import hf_config, rule_table
from cairn.interop.weights.files import CONFIG_FILE, GENERATION_FILE
from cairn.interop.weights.generation_file import generation_file
from cairn.interop.weights.weight_files import INDEX_FILE
from cairn.state.adapters.layers import adaptable_layers
from cairn.state.adapters.quantized_weight import PackedParam, QuantizedWeight
from cairn.state.checkpointing.processes import agreement
from cairn.state.models.hub.pretrained import is_weight
from cairn.state.models.hub.whole_folder import WholeFolder
from cairn.state.paths import named_leaves, too_wide
from cairn.state.sharding.gather import gather_leaf
from cairn.storage.safetensors.writer import TensorSource, index_bytes, plan_shards
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
"""Names that `plan_shards` gives to files of weights."""


class _Weights:
    """A model's weights by path, copied to the host when they are read.

    In a job of several processes they are gathered before, into `fetched`, in the same order on
    all. Quantized weights are dequantized when they are copied.
    """

    def __init__(self, model: Any) -> None:
        weights = nnx.state(model, nnx.All(is_weight, nnx.Not(PackedParam)))
        problems = too_wide(weights)
        if problems:
            raise ConversionError(
                path=type(model).__name__,
                expected="variables that are arrays of JAX, as a load builds them",
                found=f"{len(problems)} numbers or NumPy arrays that JAX holds in another dtype",
                next_step="make them arrays in the model, such as nnx.Variable(jnp.asarray(0))",
                problems=problems,
            )
        self.arrays: dict[str, jax.Array | QuantizedWeight] = {
            named.path: named.leaf for named in named_leaves(weights)
        }
        kernels = ((f"{path}/kernel", layer.kernel) for path, layer in adaptable_layers(model))
        self.arrays |= {
            path: kernel for path, kernel in kernels if isinstance(kernel, QuantizedWeight)
        }
        self.fetched: dict[str, Array] = {}

    def fetch(self, path: str, at: int | None = None) -> Array:
        """Return a weight on the host; with `at`, only that index of its leading axis."""
        ready = self.fetched.get(path)
        if ready is not None:
            return ready if at is None else ready[at]
        array = self.arrays[path]
        if isinstance(array, QuantizedWeight):
            array = array.unpack().get_value()
        return np.asarray(gather_leaf(array if at is None else array[at]))

    def leaf(self, path: str) -> MemoryLeaf:
        array = self.arrays[path]
        return MemoryLeaf(tuple(array.shape), np.dtype(array.dtype), partial(self.fetch, path))


def model_streams(
    model: Any, *, float_dtype_name: Any = None
) -> tuple[RuleTable, list[TensorSource]]:
    """Return the family's table of rules, and the model's weights under Hugging Face's names.

    Args:
        model: the model.
        float_dtype_name: dtype to cast floating weights to; None keeps their dtypes.

    Raises:
        ConversionError: the rules do not cover a weight, or the model has adapters; or, without a
            `float_dtype_name`, it has quantized weights, or weights of several dtypes that become
            one tensor.
    """
    table, _, sources = _streams(model, _Weights(model), float_dtype_name)
    return table, sources


def write_folder(
    model: Any,
    save_directory: str | os.PathLike[str] | StoreURI,
    max_shard_size: int | str,
    *,
    float_dtype: Any,
) -> list[str]:
    """Write a model as a Hugging Face folder; return the names of the files.

    Weights are written first and config.json last, so a folder with a config.json is complete. An
    existing config.json is removed before the first file is replaced. `WholeFolder` describes what
    happens if two programs write the folder at the same time.

    Args:
        model: the model.
        save_directory: the folder, local or in a store.
        max_shard_size: maximum bytes of tensors per file, as a number or a text such as "5GB".
        float_dtype: dtype to cast floating weights to; None keeps their dtypes.

    Raises:
        ConversionError: the rules do not cover a weight, or the model has adapters; or, without a
            `float_dtype`, it has quantized weights, or weights of several dtypes that become one
            tensor; or its generation_config.json is no JSON object, or too large.
        ConfigError: the family can't express the model's options.
        CorruptionError: another program has written the folder meanwhile.
        StorageError: the store is full, unreachable or forbids the write.
    """
    weights = _Weights(model)
    _, rules, sources = _streams(model, weights, float_dtype)
    config = hf_config(model.config, [source.dtype for source in sources])
    for name in model.config.tokenizer_files:
        if "/" in name or name.startswith("."):
            raise ConversionError(
                path="tokenizer_files", expected="plain file names", found=repr(name)
            )
    shards = plan_shards(sources, max_shard_size)
    folder = WholeFolder(open_files(parse_uri(save_directory)), CONFIG_FILE, INDEX_FILE)
    leaves_of = {name: rule.leaves for rule in rules for name in rule.tensors}
    small: dict[str, bytes] = dict(model.config.tokenizer_files)
    settings = generation_file(config, small.get(GENERATION_FILE))
    if settings is not None:
        small[GENERATION_FILE] = settings
    small[CONFIG_FILE] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    written = [shard.file_name for shard in shards]
    if len(shards) > 1:
        written.append(INDEX_FILE)

    def finish() -> None:
        if len(shards) > 1:
            folder.write(INDEX_FILE, index_bytes(shards))
        for entry in folder.files.list(""):  # readers would mix stale weights with the new ones
            is_weights = entry.name == INDEX_FILE or _WEIGHTS.fullmatch(entry.name)
            if is_weights and not entry.is_dir and entry.name not in written:
                folder.files.delete_tree(entry.name)
        for name, content in small.items():
            folder.write(name, content)
        folder.check()

    with ExitStack() as stack:
        _on_first(partial(stack.enter_context, folder.files.exclusive()))
        for shard in shards:
            if jax.process_count() > 1:
                # Gathering is a collective: all processes do it in the same order, in no thread.
                weights.fetched = {}  # a leaf of two files is gathered twice, on all processes
                for path in dict.fromkeys(p for t in shard.tensors for p in leaves_of[t.name]):
                    array = weights.fetch(path)
                    if jax.process_index() == 0:
                        weights.fetched[path] = array
            _on_first(partial(folder.write_shard, shard))
        _on_first(finish)
    return [*written, *small]


def _on_first(write: Callable[[], object]) -> None:
    """Run `write` on process 0; all processes wait for it, and raise its error if it fails."""

    def written() -> None:
        write()

    agreement.agree(written)


def _streams(
    model: Any, weights: _Weights, dtype: Any
) -> tuple[RuleTable, tuple[Rule, ...], list[TensorSource]]:
    _check_form(model, dtype)
    shapes = {path: tuple(array.shape) for path, array in weights.arrays.items()}
    table = rule_table(model.config, shapes)
    rules = match(table, leaves=shapes, path=type(model).__name__)
    leaves = {path: weights.leaf(path) for path in shapes}
    target = float_dtype(dtype, argument="float_dtype")
    sources = streams(rules, leaves, dtype=target, path=type(model).__name__)
    return table, rules, sources


def _check_form(model: Any, dtype: Any) -> None:
    """Raise ConversionError if the model has adapters, or quantized weights and no `dtype`."""
    # A class with `EasyBridgeMixin` only has neither attribute.
    lora, quantization = getattr(model, "lora", None), getattr(model, "quantization", None)
    if lora is not None:
        raise ConversionError(
            path=type(model).__name__,
            expected="a model without adapters",
            found=str(lora),
            next_step="save_adapter() writes the adapters by themselves; "
            "unwrap_lora_to_layers() merges them into the weights",
        )
    if quantization is not None and dtype is None:
        raise ConversionError(
            path=type(model).__name__,
            expected="floating weights, or float_dtype= to make them of the quantized ones",
            found=str(quantization),
            next_step="pass float_dtype, such as 'bfloat16', to export what they stand for",
        )
