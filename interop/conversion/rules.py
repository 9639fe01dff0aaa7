"""Rule tables between our leaves and another format's tensors, for both directions.

A table is a list of `Rule`s. Each names leaves of ours ("/"-joined paths), tensors of theirs, and
an invertible operation between the two. `match` compares a table with the leaves and tensors that
exist, and lists everything that does not fit before any weight is read.

JAX-free.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cairn.interop.conversion.ops import RENAME, Op, Shape
from cairn.interop.errors import ConversionError


@dataclass(frozen=True)
class Rule:
    """Rule that makes these leaves of ours from those tensors of theirs.

    Names may hold placeholders such as "{layer}"; `expand` fills them.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op = RENAME

    @staticmethod
    def one(ours: str, theirs: str, op: Op = RENAME) -> Rule:
        """Return a rule of one leaf and one tensor, the common case."""
        return Rule((ours,), (theirs,), op)


@dataclass(frozen=True)
class RuleTable:
    """All rules of one family and one format.

    Attributes:
        rules: in the order in which tensors are written.
        tolerated: regular expressions (whole name) of tensors of theirs that may be there and are
            not read: copies of tied weights, buffers that follow from the config.
        aliases: names that PyTorch's `state_dict` has beside the rules': tied name -> name of the
            tensor that it shares. They are never written to files.
    """

    rules: tuple[Rule, ...]
    tolerated: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


def expand(rules: Iterable[Rule], **counts: int) -> tuple[Rule, ...]:
    """Fill placeholders: `expand(rules, layer=2)` repeats each rule with "{layer}" twice.

    Neighbouring rules with a placeholder are repeated together, so that all of layer 0 comes
    before all of layer 1; the first name in `counts` is the outermost.
    """
    expanded = list(rules)
    for name, count in reversed(counts.items()):
        mark = "{" + name + "}"
        varying = [(any(mark in n for n in rule.ours + rule.theirs), rule) for rule in expanded]
        expanded = []
        for varies, run in itertools.groupby(varying, key=operator.itemgetter(0)):
            group = [rule for _, rule in run]
            times = count if varies else 1
            expanded += [_fill(rule, mark, str(i)) for i in range(times) for rule in group]
    return tuple(expanded)


def _fill(rule: Rule, mark: str, text: str) -> Rule:
    return Rule(
        tuple(name.replace(mark, text) for name in rule.ours),
        tuple(name.replace(mark, text) for name in rule.theirs),
        rule.op,
    )


def match(
    table: RuleTable,
    *,
    ours: Mapping[str, Shape],
    theirs: Mapping[str, Shape] | None = None,
    path: str,
) -> tuple[Rule, ...]:
    """Match a table with the leaves and tensors that exist, in both directions.

    Args:
        table: the rules.
        ours: every leaf of ours and its shape; each must be filled exactly once.
        theirs: every tensor of theirs and its shape; None when they are still to be written.
        path: what is being converted, for the error.

    Returns:
        The rules, all of which apply.

    Raises:
        ConversionError: anything is missing, unexpected, filled twice or of another shape; all of
            it is in `problems`.
    """
    problems: list[str] = []
    filled: dict[str, int] = {}
    read: set[str] = set()
    for rule in table.rules:
        for name in rule.ours:
            filled[name] = filled.get(name, 0) + 1
        read.update(rule.theirs)
        problems += _rule_problems(rule, ours, theirs)
    problems += [f"filled {n} times: {name}" for name, n in filled.items() if n > 1]
    problems += [f"no rule makes our leaf: {name}" for name in ours if name not in filled]
    if theirs is not None:
        tolerated = [re.compile(pattern) for pattern in table.tolerated]
        problems += [
            f"unexpected tensor: {name} {theirs[name]}"
            for name in theirs
            if name not in read and not any(p.fullmatch(name) for p in tolerated)
        ]
    if problems:
        raise ConversionError(
            path=path,
            expected=f"{len(ours)} leaves and their tensors to match one to one",
            found=f"{len(problems)} problem(s)",
            next_step="check that config.json belongs to these weights",
            problems=problems,
        )
    return table.rules


def _rule_problems(
    rule: Rule, ours: Mapping[str, Shape], theirs: Mapping[str, Shape] | None
) -> list[str]:
    problems = [f"no such leaf of ours: {name}" for name in rule.ours if name not in ours]
    if theirs is None:
        if problems:
            return problems
        try:
            rule.op.their_shapes([ours[name] for name in rule.ours])
        except ValueError as exc:
            problems.append(f"{', '.join(rule.ours)}: expected {exc}")
        return problems
    problems += [f"missing tensor: {name}" for name in rule.theirs if name not in theirs]
    if problems:
        return problems
    found = [theirs[name] for name in rule.theirs]
    try:
        made = rule.op.our_shapes(found)
    except ValueError as exc:
        return [f"{', '.join(rule.theirs)}: expected {exc}"]
    return [
        f"shape of {', '.join(rule.theirs)}: expected {want} for {name}, found {got} (from {found})"
        for name, want, got in zip(rule.ours, (ours[n] for n in rule.ours), made, strict=True)
        if want != got
    ]
