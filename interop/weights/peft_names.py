"""Mapping between our adapters and PEFT's, through the family's weight rules.

We keep adapters A [in, rank] and B [rank, out] beside a kernel [in, out]; PEFT keeps
`<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank] beside a module's
weight. The family's rule says which module a kernel belongs to, and how its outputs are transposed
or joined. No rule changes the inputs, so A is only transposed; B is converted like the kernel.

A module that joins several of our kernels (a fused qkv projection) has one A for all of them. Then
three adapters of rank r become one of rank 3r whose B is block-diagonal, and one adapter becomes
three with the same A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.conversion.rules import Rule
from cairn.interop.errors import ConversionError
from cairn.interop.families.family import get_family

__all__ = ["AdaptedModule", "Pair", "modules_of", "modules_of_rules"]

Pair = tuple[Array, Array]
"""A [in, rank] and B [rank, out] of an adapter."""

_PROBE = 1_000_003
"""Number of inputs unlike any number of outputs, to find the inputs' axis after an operation."""


@dataclass(frozen=True)
class AdaptedModule:
    """PEFT module and the kernels of our model that its weight holds.

    Attributes:
        name: name of the module, such as "model.layers.0.self_attn.q_proj".
        kernels: paths of our kernels.
        sizes: number of outputs of each kernel.
        inputs: number of inputs, the same for all kernels.
        rule: conversion rule between the kernels and the module's weight.
        inputs_first: whether the module stores its weight [in, out], as in GPT-2.
        refusal: why PEFT can't adapt the module; None: it can.
    """

    name: str
    kernels: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: int
    rule: Rule
    inputs_first: bool
    refusal: str | None = None

    @property
    def outputs(self) -> int:
        """Number of outputs of the module."""
        return sum(self.sizes)

    def to_peft(self, pairs: Sequence[Pair | None]) -> Pair:
        """Return `lora_A.weight` and `lora_B.weight` of the module, made from the kernels' pairs.

        Args:
            pairs: A and B of each kernel; None for a kernel without adapters, which becomes zeros.
        """
        pairs = _in_one_dtype(pairs)
        present = [pair for pair in pairs if pair is not None]
        a, b = present[0]
        if len(present) == len(pairs) and all(np.array_equal(a, other) for other, _ in present):
            downs, ups = [a], [b for _, b in present]
        else:
            rank = a.shape[1]
            downs = [np.zeros_like(a) if pair is None else pair[0] for pair in pairs]
            ups = [np.zeros((rank * len(pairs), size), b.dtype) for size in self.sizes]
            for number, (wide, pair) in enumerate(zip(ups, pairs, strict=True)):
                if pair is not None:
                    wide[number * rank : (number + 1) * rank] = pair[1]
        (tensor,) = self.rule.op.to_hf(ups)
        up = tensor.T if self.inputs_first else tensor
        return np.ascontiguousarray(np.concatenate(downs, axis=1).T), np.ascontiguousarray(up)

    def from_peft(self, down: Array, up: Array, rank: int) -> list[Pair]:
        """Return A and B of each kernel, made from `lora_A.weight` and `lora_B.weight`.

        Args:
            down: `lora_A.weight`, [rank of the module, in].
            up: `lora_B.weight`, [out, rank of the module].
            rank: the adapters' usual rank. If `up` is block-diagonal with a block of this rank for
                each kernel, each kernel gets its block; otherwise all kernels share A.
        """
        tensor = up.T if self.inputs_first else up
        ups = self.rule.op.from_hf([tensor])
        a = down.T
        blocks = [slice(n * rank, (n + 1) * rank) for n in range(len(self.kernels))]
        if len(self.kernels) > 1 and a.shape[1] == rank * len(self.kernels):
            outside = [np.delete(b, block, axis=0) for b, block in zip(ups, blocks, strict=True)]
            if not any(part.any() for part in outside):
                return [(a[:, block], b[block]) for b, block in zip(ups, blocks, strict=True)]
        return [(a, b) for b in ups]


def _in_one_dtype(pairs: Sequence[Pair | None]) -> list[Pair | None]:
    """Return pairs cast to one dtype: their common one, or a float that holds all their values."""
    dtypes = {part.dtype for pair in pairs if pair is not None for part in pair}
    if len(dtypes) == 1:
        return list(pairs)
    common = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
    return [
        None if pair is None else (pair[0].astype(common), pair[1].astype(common)) for pair in pairs
    ]


def modules_of(config: object, kernels: Mapping[str, Shape], *, path: str) -> list[AdaptedModule]:
    """Return every module that can have adapters, in the order of the family's rules.

    Args:
        config: config of the model.
        kernels: shape of every kernel that can have adapters, by path.
        path: name of the conversion, for the error.

    Raises:
        ConversionError: the model is of no family, so that its modules have no names in PEFT.
    """
    if not isinstance(config, DecoderConfig):
        raise ConversionError(
            path=path,
            expected="a model of a known family",
            found=f"a config of type {type(config).__name__}",
            next_step="adapters of a model of your own are saved with the state, by save_state",
        )
    names = get_family(config.model_type).names_of(config)
    return [
        replace(
            module,
            name=names.modules.get(module.name, module.name),
            refusal=next(
                (
                    why
                    for pattern, why in names.no_adapters.items()
                    if re.fullmatch(pattern, module.name)
                ),
                None,
            ),
        )
        for module in modules_of_rules(names.rules(config).rules, kernels)
    ]


def modules_of_rules(rules: Sequence[Rule], kernels: Mapping[str, Shape]) -> list[AdaptedModule]:
    """Return every module that can have adapters, from a family's rules; see `modules_of`."""
    modules = (
        _module(rule, [kernels[path] for path in rule.leaves])
        for rule in rules
        if all(len(kernels.get(path, ())) == 2 for path in rule.leaves)
    )
    return [module for module in modules if module is not None]


def _module(rule: Rule, shapes: Sequence[Shape]) -> AdaptedModule | None:
    """Return the module of a rule's weight; None if the weight is not one matrix in PEFT."""
    sizes = tuple(outputs for _, outputs in shapes)
    if len(rule.tensors) != 1 or not rule.tensors[0].endswith(".weight"):
        return None
    try:
        (shape,) = rule.op.tensor_shapes([(_PROBE, size) for size in sizes])
    except ValueError:
        return None
    if sorted(shape) != sorted((_PROBE, sum(sizes))):
        return None
    return AdaptedModule(
        name=rule.tensors[0].removesuffix(".weight"),
        kernels=rule.leaves,
        sizes=sizes,
        inputs=shapes[0][0],
        rule=rule,
        inputs_first=shape[0] == _PROBE,
    )
