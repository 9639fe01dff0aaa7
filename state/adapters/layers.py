"""Search for layers that can be quantized or adapted, and changes of those that match a pattern."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

import jax
from flax import nnx

from cairn.interop.errors import ArgumentError
from cairn.state.adapters.adapted_layers import (
    adapted,
    add_adapters,
    can_be_adapted,
    has_adapters,
    merge_adapters,
    pack_kernel,
    remove_adapters,
    replace,
    unadapted,
    unpack_kernel,
)
from cairn.state.adapters.lora import LoraSettings
from cairn.state.adapters.products import contracted_axes
from cairn.state.adapters.quantization import QuantizationSettings, group_length
from cairn.state.adapters.quantized_weight import QuantizedWeight

__all__ = [
    "adaptable_layers",
    "check_mergeable",
    "dequantize_layers",
    "give_adapters",
    "layers_to_quantize",
    "matching_layers",
    "merge_layers",
    "quantize_layers",
    "unwrap_layers",
]

Layers = list[tuple[str, Any]]


def adaptable_layers(model: Any) -> Layers:
    """Return the layers that can be adapted, by "/"-joined path, in the order of their paths.

    These are `nnx.Linear`, `nnx.LinearGeneral`, `nnx.Einsum` and their subclasses that keep
    `__call__`. Left out are embeddings (also as a tied head), norms, layers that share their kernel
    with another layer, layers whose kernel is stacked for a scan, and layers with a `dot_general`
    of their own.
    """
    layers: Layers = []
    owners: Counter[int] = Counter()
    for path, module in nnx.iter_modules(model):
        owners.update(
            id(value) for value in vars(module).values() if isinstance(value, nnx.Variable)
        )
        if can_be_adapted(module):
            layers.append(("/".join(map(str, path)), module))
    return [(path, layer) for path, layer in layers if owners[id(layer.kernel)] <= 1]


def quantize_layers(model: Any, settings: QuantizationSettings) -> None:
    """Quantize the kernels of all layers that the settings' pattern matches, one by one.

    Kernels of experts stay floating; a warning names those that the pattern matches.

    Raises:
        ArgumentError: if no layer matches, or if the group size does not divide a layer's number
            of inputs; lists all such layers. The model is unchanged.
    """
    layers = matching_layers(model, "quantization_pattern", settings.pattern)
    lengths = {path: layer.kernel.shape[contracted_axes(layer)[-1]] for path, layer in layers}
    problems = [
        f"{path}: {length} inputs"
        for path, length in lengths.items()
        if length % group_length(length, settings.group_size)
    ]
    if problems:
        raise ArgumentError(
            path="group_size",
            expected="a number that divides the inputs of every layer",
            found=str(settings.group_size),
            next_step="choose another, -1 for one group, or leave these layers out by the pattern",
            problems=problems,
        )
    _tell_of_experts(model, settings.pattern)
    # The model drops the plain layers, so each floating kernel is freed once it is packed.
    layers = _adapted_in(model, layers)
    for _, layer in layers:
        pack_kernel(layer, settings)


def layers_to_quantize(model: Any, settings: QuantizationSettings) -> dict[str, Any]:
    """Put adapted layers in place of those to quantize; return them by the paths of their kernels.

    The kernels are still floating: `pack_kernel` quantizes them.

    Args:
        model: a floating model, changed in place; its leaves may be abstract.
        settings: their pattern selects the layers.

    Raises:
        ArgumentError: if the pattern matches no layer.
    """
    layers = matching_layers(model, "quantization_pattern", settings.pattern)
    return {f"{path}/kernel": layer for path, layer in _adapted_in(model, layers)}


def dequantize_layers(model: Any) -> None:
    """Replace every quantized kernel of a model by its dequantized, floating values."""
    layers = [
        layer for _, layer in adaptable_layers(model) if isinstance(layer.kernel, QuantizedWeight)
    ]
    for layer in layers:
        unpack_kernel(layer)
    replace(model, [(layer, unadapted(layer)) for layer in layers])


def give_adapters(model: Any, settings: LoraSettings, rngs: nnx.Rngs | None) -> None:
    """Add adapters to all layers that the settings' pattern matches.

    Args:
        model: the model, changed in place.
        settings: the adapters' settings.
        rngs: source of the key for the adapters' random values; None for the key of seed 0.

    Raises:
        ArgumentError: if no layer matches. The model is unchanged.
    """
    layers = _adapted_in(model, matching_layers(model, "lora_pattern", settings.pattern))
    key = jax.random.key(0) if rngs is None else rngs.params()
    for number, (_, layer) in enumerate(layers):
        add_adapters(layer, settings, jax.random.fold_in(key, number))


def check_mergeable(model: Any) -> None:
    """Check that every adapter can be merged.

    Raises:
        ArgumentError: if a layer with adapters shares its kernel with another layer, whose outputs
            would change; lists all such layers.
    """
    own = {id(layer) for _, layer in adaptable_layers(model)}
    problems = [
        "/".join(map(str, path))
        for path, layer in nnx.iter_modules(model)
        if has_adapters(layer) and id(layer) not in own
    ]
    if problems:
        raise ArgumentError(
            path=f"adapters of {type(model).__name__}",
            expected="each beside a kernel of its own, to be merged into",
            found=f"{len(problems)} beside a kernel that other layers have too",
            next_step="tie kernels before apply_lora_to_layers(), which then leaves them out",
            problems=problems,
        )


def merge_layers(model: Any) -> None:
    """Add every adapter's effect to its layer's floating kernel, and set its B to zero."""
    for _, layer in adaptable_layers(model):
        if has_adapters(layer):
            merge_adapters(layer)


def unwrap_layers(model: Any) -> None:
    """Remove all adapters from a model without merging them."""
    layers = [layer for _, layer in adaptable_layers(model) if has_adapters(layer)]
    for layer in layers:
        remove_adapters(layer)
    replace(model, [(layer, unadapted(layer)) for layer in layers])


def matching_layers(model: Any, argument: str, pattern: str) -> Layers:
    """Return the adaptable layers whose path a pattern matches.

    Args:
        model: the model.
        argument: name of the argument that has the pattern, for the error.
        pattern: regular expression, searched in the "/"-joined path of each layer.

    Raises:
        ArgumentError: if no layer matches; lists the layers that could match.
    """
    layers = adaptable_layers(model)
    compiled = re.compile(pattern)
    matching = [(path, layer) for path, layer in layers if compiled.search(path)]
    if not matching:
        paths = [path for path, _ in layers]
        raise ArgumentError(
            path=argument,
            expected="a regular expression that is found in the path of a layer",
            found=f"{pattern!r}, which matches none of {len(paths)}",
            next_step=f"the layers of {type(model).__name__} that could match:",
            problems=_condensed(paths) or ["none: it has no linear layers"],
        )
    return matching


def _adapted_in(model: Any, layers: Layers) -> Layers:
    """Replace layers of the model by adapted layers, and return these with their paths."""
    ready = [(path, adapted(layer)) for path, layer in layers]
    replace(model, [(old, new) for (_, old), (_, new) in zip(layers, ready, strict=True)])
    return ready


def _tell_of_experts(model: Any, pattern: str) -> None:
    """Warn if a pattern matches kernels of experts, which may be most of a model's weights."""
    kernels = [
        ("/".join(map(str, path)), getattr(module, "kernel", None))
        for path, module in nnx.iter_modules(model)
    ]
    left = [
        path
        for path, kernel in kernels
        if isinstance(kernel, nnx.Variable)
        and (kernel.get_metadata().get("axes") or ("",))[0] == "experts"
        and re.search(pattern, path)
    ]
    if left:
        warnings.warn(
            f"{type(model).__name__}: linear layers are quantized; the kernels of experts stay "
            f"floating: {', '.join(_condensed(left))}",
            stacklevel=4,
        )


def _condensed(paths: list[str]) -> list[str]:
    """Return paths as lines; paths that differ only in numbers become one line with "low..high"."""
    numbers: dict[tuple[str, ...], list[list[int]]] = {}
    for path in paths:
        parts = path.split("/")
        shape = tuple("*" if part.isdigit() else part for part in parts)
        numbers.setdefault(shape, []).append([int(part) for part in parts if part.isdigit()])
    lines = []
    for shape, rows in numbers.items():
        spans = iter([(min(column), max(column)) for column in zip(*rows, strict=True)])
        parts = []
        for part in shape:
            low, high = next(spans) if part == "*" else (0, 0)
            parts.append(part if part != "*" else str(low) if low == high else f"{low}..{high}")
        lines.append("/".join(parts))
    return lines
