"""Rule tables between a model's leaves and another format's tensors, for both directions.

A table is a list of `Rule`s. Each names some leaves ("/"-joined paths), some tensors of the other
format, and an invertible operation between the two. `match` compares a table with the leaves and
tensors that exist, and lists everything that does not fit before any weight is read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cairn.interop.conversion.ops import RENAME, Op, Shape
from cairn.interop.errors import ConversionError


@dataclass(frozen=True)
class Rule:
    """Rule that turns tensors of another format into leaves, and back."""

    leaves: tuple[str, ...]
    tensors: tuple[str, ...]
    op: Op = RENAME

    @staticmethod
    def one(leaf: str, tensor: str, op: Op = RENAME) -> Rule:
        """Return a rule for one leaf and one tensor, the common case."""
        return Rule((leaf,), (tensor,), op)


@dataclass(frozen=True)
class RuleTable:
    """All rules of one family and one format.

    Attributes:
        rules: the rules, in the order in which tensors are written.
        tolerated: regular expressions that match whole names of tensors which may exist but are not
            read: copies of tied weights, buffers that follow from the config.
        aliases: tied names, which PyTorch's `state_dict` has besides: tied name -> name of the
            tensor that it shares. They are never written to files.
    """

    rules: tuple[Rule, ...]
    tolerated: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


def match(
    table: RuleTable,
    *,
    leaves: Mapping[str, Shape],
    tensors: Mapping[str, Shape] | None = None,
    path: str,
    next_step: str = "check that config.json belongs to these weights",
) -> tuple[Rule, ...]:
    """Return a table's rules that apply to the leaves and tensors that exist.

    Args:
        table: the rules.
        leaves: every leaf and its shape; each must be filled exactly once.
        tensors: every tensor and its shape; None if the tensors are yet to be written.
        path: name of the conversion in the error, such as a folder.
        next_step: what the error proposes.

    Returns:
        The rules; together they fill every leaf exactly once.

    Raises:
        ConversionError: a leaf or tensor is missing, unexpected, filled twice or of another shape;
            `problems` lists all.
    """
    problems: list[str] = []
    filled: dict[str, int] = {}
    read = {*_read(table)}
    for rule in table.rules:
        for name in rule.leaves:
            filled[name] = filled.get(name, 0) + 1
        problems += _rule_problems(rule, leaves, tensors)
    problems += [f"filled {n} times: {name}" for name, n in filled.items() if n > 1]
    problems += [f"read {n} times: {name}" for name, n in Counter(_read(table)).items() if n > 1]
    problems += [f"no rule makes our leaf: {name}" for name in leaves if name not in filled]
    if tensors is not None:
        tolerated = [re.compile(pattern) for pattern in table.tolerated]
        problems += [
            f"unexpected tensor: {name} {tensors[name]}"
            for name in tensors
            if name not in read and not any(p.fullmatch(name) for p in tolerated)
        ]
    if problems:
        raise ConversionError(
            path=path,
            expected=f"{len(leaves)} leaves and their tensors to match one to one",
            found=f"{len(problems)} problem(s)",
            next_step=next_step,
            problems=problems,
        )
    return table.rules


def _read(table: RuleTable) -> list[str]:
    """Return the tensors that the rules read, once for each time."""
    return [name for rule in table.rules for name in rule.tensors]


def _rule_problems(
    rule: Rule, leaves: Mapping[str, Shape], tensors: Mapping[str, Shape] | None
) -> list[str]:
    problems = [f"no such leaf of ours: {name}" for name in rule.leaves if name not in leaves]
    if tensors is None:
        if problems:
            return problems
        try:
            rule.op.tensor_shapes([leaves[name] for name in rule.leaves])
        except ValueError as exc:
            problems.append(f"{', '.join(rule.leaves)}: expected {exc}")
        return problems
    problems += [f"missing tensor: {name}" for name in rule.tensors if name not in tensors]
    if problems:
        return problems
    shapes = [tensors[name] for name in rule.tensors]
    try:
        converted = rule.op.leaf_shapes(shapes)
    except ValueError as exc:
        return [f"{', '.join(rule.tensors)}: expected {exc}"]
    return [
        f"shape of {', '.join(rule.tensors)}: expected {want} for {name}, "
        f"found {got} (from {shapes})"
        for name, want, got in zip(
            rule.leaves, (leaves[n] for n in rule.leaves), converted, strict=True
        )
        if want != got
    ]
