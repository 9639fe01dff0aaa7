"""Adapters of a model in memory as a folder that `peft` loads, and back.

The folder holds adapter_model.safetensors and adapter_config.json. The config is written last, so a
folder with a config is complete. Pickled adapters are never read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.errors import ArgumentError, ConversionError
from cairn.interop.names import TaskType
from cairn.interop.weights.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    PEFT_PREFIX,
    adapter_content,
    array_source,
)
from cairn.interop.weights.hub_folder import find_folder
from cairn.interop.weights.peft_config import PeftConfig
from cairn.interop.weights.peft_names import AdaptedModule, Pair, modules_of
from cairn.interop.weights.source_folder import SourceFolder, parse_json
from cairn.state.adapters.layers import adaptable_layers
from cairn.state.adapters.lora import LoraSettings
from cairn.state.adapters.quantized_weight import QuantizedWeight
from cairn.state.checkpointing.processes import agreement
from cairn.state.models.hub.pretrained import put
from cairn.state.models.hub.whole_folder import WholeFolder
from cairn.state.paths import named_leaves
from cairn.state.sharding.gather import gather_leaf
from cairn.storage.errors import NotFoundError
from cairn.storage.safetensors.reader import read_header, read_tensor
from cairn.storage.safetensors.writer import Shard
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "read_adapter", "write_adapter"]

CONFIG_FILE = ADAPTER_CONFIG_FILE
WEIGHTS_FILE = ADAPTER_FILE

_TASKS = {TaskType.CAUSAL_LM: "CAUSAL_LM"}


def write_adapter(
    model: Any,
    directory: str | os.PathLike[str] | StoreURI,
    *,
    base_model_name_or_path: str | None,
) -> list[str]:
    """Write a model's adapters and return the files' names. All processes must call this.

    Raises:
        ArgumentError: the model has no adapters.
        ConversionError: the model is of no supported family, or its family's transformers model
            has no module for some adapters; all are listed.
        StorageError: the store is full, unreachable or forbids the write.
    """
    settings = model.lora
    if settings is None:
        raise ArgumentError(
            path="save_adapter",
            expected="a model with adapters",
            found=f"a {type(model).__name__} that has none",
            next_step="call apply_lora_to_layers() first",
        )
    where = type(model).__name__
    leaves = {named.path: named.leaf for named in named_leaves(nnx.state(model, nnx.LoRAParam))}

    def pair(kernel: str) -> Pair:
        a, b = (gather_leaf(leaves[f"{kernel}_lora_{letter}"]) for letter in "ab")
        return np.asarray(a), np.asarray(b)

    tensors, config = adapter_content(
        modules_of(model.config, _kernels(model), path=where),
        {path.removesuffix("_lora_a") for path in leaves if path.endswith("_lora_a")},
        pair,
        rank=settings.rank,
        alpha=settings.alpha,
        task_type=_TASKS[model.model_task],
        base_model_name_or_path=base_model_name_or_path,
        path=where,
    )
    folder = WholeFolder(open_files(parse_uri(directory)), CONFIG_FILE)

    def write() -> None:
        sources = tuple(array_source(name, array) for name, array in tensors.items())
        nbytes = sum(source.nbytes for source in sources)
        with folder.files.exclusive():
            folder.write_shard(Shard(WEIGHTS_FILE, sources, nbytes))
            content = json.dumps(config, indent=2, sort_keys=True) + "\n"
            folder.write(CONFIG_FILE, content.encode())
            folder.check()

    agreement.agree(write)
    return [WEIGHTS_FILE, CONFIG_FILE]


def read_adapter(
    model: Any,
    directory: str | os.PathLike[str] | StoreURI,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> None:
    """Load the adapters of a folder into a model, bit for bit; see `EasyBridgeMixin.load_adapter`.

    Raises:
        NotFoundError: the source does not exist, or has no safetensors.
        ConversionError: the adapter is more than plain LoRA, or does not fit the model; all
            problems are listed.
        ArgumentError: the model has adapters of another rank or scale, or on other layers.
    """
    folder = find_folder(
        directory,
        config_file=CONFIG_FILE,
        revision=revision,
        token=token,
        local_files_only=local_files_only,
    )
    raw = folder.read_bytes(CONFIG_FILE)
    if raw is None or WEIGHTS_FILE not in folder.names():
        raise NotFoundError(
            path=folder.uri,
            expected=f"{CONFIG_FILE} and {WEIGHTS_FILE}",
            found=", ".join(folder.names()[:8]) or "nothing",
            next_step="save it with peft's save_pretrained: pickled adapters are never read",
        )
    where = f"{folder.uri}/{CONFIG_FILE}"
    config = PeftConfig.read(parse_json(raw, where), path=where)
    folder.fetch([WEIGHTS_FILE])
    kernels = _kernels(model)
    every = modules_of(model.config, kernels, path=str(folder.uri))
    modules = {module.name: module for module in every}
    adapters, weights = _read_modules(folder, modules, config)
    _check_weights(model, modules, weights, path=f"{folder.uri}/{WEIGHTS_FILE}")
    settings = _settings(adapters, modules, config, kernels, path=str(folder.uri))
    pairs: dict[str, Pair] = {}
    for name, (down, up) in adapters.items():
        module = modules[name]
        converted = module.from_peft(down, up, config.rank)
        pairs |= dict(zip(module.kernels, converted, strict=True))
    _set_adapters(model, settings, pairs, path=str(folder.uri))


def _kernels(model: Any) -> dict[str, Shape]:
    """Return the shape of every kernel that can have adapters, by path, quantized ones too."""
    return {f"{path}/kernel": tuple(layer.kernel.shape) for path, layer in adaptable_layers(model)}


def _read_modules(
    folder: SourceFolder, modules: Mapping[str, AdaptedModule], config: PeftConfig
) -> tuple[dict[str, Pair], dict[str, Array]]:
    """Return (`lora_A.weight`, `lora_B.weight`) by module, and other stored weights by module.

    Raises:
        ConversionError: tensors are not plain LoRA of these modules; all problems are listed.
    """
    files, rel = folder.locate(WEIGHTS_FILE)
    header = read_header(files, rel)
    problems: list[str] = []
    names: dict[str, dict[str, str]] = {}
    weights: dict[str, str] = {}
    pattern = re.compile(rf"{re.escape(PEFT_PREFIX)}(.+)\.(lora_[AB]|base_layer)\.weight")
    for tensor in header.tensors:
        match = pattern.fullmatch(tensor)
        if match is None or match[1] not in modules:
            problems.append(f"unexpected tensor: {tensor} {header.tensors[tensor].shape}")
        elif match[2] == "base_layer":
            weights[match[1]] = tensor
        else:
            names.setdefault(match[1], {})[match[2][-1]] = tensor
    for name, tensors in names.items():
        module, rank = modules[name], config.rank_of(name)
        for letter, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank))):
            if letter not in tensors:
                problems.append(f"missing tensor: {PEFT_PREFIX}{name}.lora_{letter}.weight {shape}")
            elif (got := header.tensors[tensors[letter]].shape) != shape:
                problems.append(f"shape of {tensors[letter]}: expected {shape}, found {got}")
    if problems or not names:
        raise ConversionError(
            path=f"{folder.uri}/{WEIGHTS_FILE}",
            expected="A and B of modules that the model has",
            found=f"{len(problems)} problem(s)" if names else "no adapters",
            next_step="load it into the model that it was trained for",
            problems=problems,
        )

    def read(tensor: str) -> Array:
        array: Array = read_tensor(files, rel, tensor, header=header)
        return array

    pairs = {name: (read(letters["A"]), read(letters["B"])) for name, letters in names.items()}
    return pairs, {name: read(tensor) for name, tensor in weights.items()}


def _check_weights(
    model: Any, modules: Mapping[str, AdaptedModule], weights: Mapping[str, Array], *, path: str
) -> None:
    """Check that the weights which PEFT stored together with adapters equal the model's.

    PEFT stores the weight of an adapted head, even if it was not trained.

    Args:
        model: the model that gets the adapters.
        modules: the model's modules, by name.
        weights: the stored weights, by module.
        path: the file, for the error.

    Raises:
        ConversionError: weights differ, or the model's are quantized; all are listed.
    """
    layers = dict(adaptable_layers(model)) if weights else {}
    problems = []
    for name, weight in weights.items():
        module = modules[name]
        kernels = [layers[path.removesuffix("/kernel")].kernel for path in module.kernels]
        if any(isinstance(kernel, QuantizedWeight) for kernel in kernels):
            problems.append(f"{name}: quantized here")
            continue
        own = [np.asarray(gather_leaf(kernel.get_value())) for kernel in kernels]
        (exported,) = module.rule.op.to_hf(own)
        narrow = min(exported.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
        if not np.array_equal(exported.astype(narrow), weight.astype(narrow)):
            problems.append(f"{name}: other numbers, or another shape")
    if problems:
        raise ConversionError(
            path=path,
            expected="of the model's own weights beside adapters those that it has",
            found=f"{len(problems)} others",
            next_step="load it into the model that it was trained for; or save it with "
            "save_embedding_layers=False, or merge it (merge_and_unload), and load the result",
            problems=problems,
        )


def _settings(
    adapters: Mapping[str, Pair],
    modules: Mapping[str, AdaptedModule],
    config: PeftConfig,
    kernels: Mapping[str, Shape],
    *,
    path: str,
) -> LoraSettings:
    """Return the settings of adapters that are equal on all layers: rank, scale, pattern, dtype.

    Raises:
        ConversionError: ranks or scales differ between layers.
    """
    sizes: dict[tuple[int, float], list[str]] = {}
    for name, (down, up) in adapters.items():
        module, rank = modules[name], down.shape[0]
        lora_rank = module.from_peft(down, up, config.rank)[0][0].shape[1]
        sizes.setdefault((lora_rank, config.scale(name, rank)), []).append(name)
    if len(sizes) > 1:
        raise ConversionError(
            path=path,
            expected="one rank and one scale for all layers",
            found=f"{len(sizes)} kinds",
            next_step="merge the adapter with peft (merge_and_unload), and load the result",
            problems=[
                f"rank {rank}, scale {scale}: {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                for (rank, scale), names in sizes.items()
            ],
        )
    ((rank, scale),) = sizes
    paths = [
        kernel.removesuffix("/kernel") for name in adapters for kernel in modules[name].kernels
    ]
    others = {kernel.removesuffix("/kernel") for kernel in kernels} - set(paths)
    dtypes = {array.dtype.name for pair in adapters.values() for array in pair}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return LoraSettings(rank, scale * rank, _pattern(paths, others), dtype)


def _pattern(paths: list[str], others: set[str]) -> str:
    """Return a regular expression that matches all of `paths` and none of `others`."""
    shapes = dict.fromkeys(re.sub(r"(?<=/)\d+(?=/)", r"\\d+", re.escape(path)) for path in paths)
    pattern = f"^(?:{'|'.join(shapes)})$"
    if any(re.search(pattern, path) for path in others):
        return f"^(?:{'|'.join(map(re.escape, paths))})$"
    return pattern


def _set_adapters(
    model: Any, settings: LoraSettings, pairs: Mapping[str, Pair], *, path: str
) -> None:
    """Put adapters into a model; add adapter layers first if it has none.

    Raises:
        ArgumentError: the model has adapters of another rank or scale, or on other layers.
    """
    arrays = {
        f"{kernel}_lora_{letter}": array
        for kernel, pair in pairs.items()
        for letter, array in zip("ab", pair, strict=True)
    }
    own = model.lora
    if own is None:
        rank, alpha, dtype = settings.rank, settings.alpha, settings.dtype
        model.apply_lora_to_layers(rank, alpha, settings.pattern, lora_dtype=dtype)
    leaves = {named.path: named.leaf for named in named_leaves(nnx.state(model, nnx.LoRAParam))}
    same = own is None or (own.rank, own.scale) == (settings.rank, settings.scale)
    if not same or leaves.keys() != arrays.keys():
        raise ArgumentError(
            path=path,
            expected=f"adapters as the model has them: {own}",
            found=f"rank {settings.rank}, scale {settings.scale}, on {len(pairs)} layers",
            next_step="call unwrap_lora_to_layers() first, or load into a model without adapters",
        )
    tree = nnx.state(model, nnx.LoRAParam)
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = []
    for named in named_leaves(tree):
        array, leaf = arrays[named.path], named.leaf
        place = leaf.sharding if isinstance(leaf, jax.Array) else first_device
        placed.append(put(array, array.dtype, place))
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(tree), placed))
    model.lora = dataclasses.replace(model.lora, dtype=settings.dtype)
