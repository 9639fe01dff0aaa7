"""Rule tables between our leaves and another format's tensors, read in both directions.

A table is a list of `Rule`s. Each names leaves of ours ("/"-joined paths), tensors of theirs, and
an invertible operation between the two. `match` holds a table against the leaves and tensors that
are really there, and lists everything that does not fit before any weight is read.

JAX-free: operations work on NumPy arrays, one rule at a time, so memory is bounded by the largest
rule, not by the model.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from state.errors import ConversionError

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]


class Op(Protocol):
    """An invertible operation from tensors of theirs to leaves of ours."""

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Our leaves, made of their tensors."""
        ...

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Their tensors, made of our leaves: exactly undoes `to_ours`."""
        ...

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """The shapes that `to_ours` would give; ValueError if theirs don't fit."""
        ...

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """The shapes that `to_theirs` would give; ValueError if ours don't fit."""
        ...


@dataclass(frozen=True)
class Rename:
    """Same numbers under another name."""

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Their tensors as they are."""
        return list(theirs)

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Our leaves as they are."""
        return list(ours)

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Unchanged."""
        return list(theirs)

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Unchanged."""
        return list(ours)


@dataclass(frozen=True)
class Transpose:
    """Swaps the last two axes: PyTorch keeps [out, in], we keep [in, out]."""

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Each tensor with its last two axes swapped."""
        return [np.swapaxes(array, -1, -2) for array in theirs]

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Each leaf with its last two axes swapped."""
        return self.to_ours(ours)

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Each shape with its last two axes swapped."""
        for shape in theirs:
            _require(len(shape) >= 2, f"at least 2 axes to transpose, found shape {shape}")
        return [(*shape[:-2], shape[-1], shape[-2]) for shape in theirs]

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Each shape with its last two axes swapped."""
        return self.our_shapes(ours)


@dataclass(frozen=True)
class Split:
    """One fused tensor of theirs is several leaves of ours, `sizes` long along `axis`."""

    sizes: tuple[int, ...]
    axis: int = 0

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """The pieces."""
        (fused,) = theirs
        return list(np.split(fused, np.cumsum(self.sizes)[:-1], axis=self.axis))

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """The pieces, joined."""
        return [np.concatenate(list(ours), axis=self.axis)]

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """One shape for each size."""
        (fused,) = theirs
        _require(
            len(fused) > self.axis and fused[self.axis] == sum(self.sizes),
            f"axis {self.axis} of {fused} to be {' + '.join(map(str, self.sizes))}",
        )
        return [(*fused[: self.axis], n, *fused[self.axis + 1 :]) for n in self.sizes]

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """The joined shape."""
        found = [shape[self.axis] if len(shape) > self.axis else None for shape in ours]
        rest = {(*shape[: self.axis], *shape[self.axis + 1 :]) for shape in ours}
        _require(
            found == list(self.sizes) and len(rest) == 1,
            f"axis {self.axis} to be {list(self.sizes)} long, found shapes {list(ours)}",
        )
        first = ours[0]
        return [(*first[: self.axis], sum(self.sizes), *first[self.axis + 1 :])]


@dataclass(frozen=True)
class Fuse:
    """Several tensors of theirs are one leaf of ours, joined along `axis`."""

    sizes: tuple[int, ...]
    axis: int = 0

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """The tensors, joined."""
        return Split(self.sizes, self.axis).to_theirs(theirs)

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """The leaf, cut."""
        return Split(self.sizes, self.axis).to_ours(ours)

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """The joined shape."""
        return Split(self.sizes, self.axis).their_shapes(theirs)

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """One shape for each size."""
        return Split(self.sizes, self.axis).our_shapes(ours)


@dataclass(frozen=True)
class Stack:
    """`count` tensors of theirs (one per expert, say) are one leaf of ours with a leading axis."""

    count: int

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """The tensors, stacked."""
        return [np.stack(list(theirs))]

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """The layers of the leaf."""
        (stacked,) = ours
        return list(stacked)

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """The stacked shape."""
        _require(
            len(theirs) == self.count and len(set(theirs)) == 1,
            f"{self.count} tensors of one shape, found shapes {list(theirs)}",
        )
        return [(self.count, *theirs[0])]

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """One shape for each tensor."""
        (stacked,) = ours
        _require(
            len(stacked) >= 1 and stacked[0] == self.count,
            f"leading axis {self.count}, found shape {stacked}",
        )
        return [stacked[1:]] * self.count


@dataclass(frozen=True)
class RotaryRows:
    """Rows of each head: x0 y0 x1 y1 ... in theirs, x0 x1 ... y0 y1 ... in ours.

    llama.cpp rotates neighbouring pairs, Hugging Face rotates across the two halves of a head.
    """

    heads: int

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Rows in halves."""
        return [self._reorder(array, halves=True) for array in theirs]

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Rows interleaved."""
        return [self._reorder(array, halves=False) for array in ours]

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Unchanged."""
        for shape in theirs:
            _require(
                bool(shape) and shape[0] % (2 * self.heads) == 0,
                f"rows to divide by 2 x {self.heads} heads, found shape {shape}",
            )
        return list(theirs)

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Unchanged."""
        return self.our_shapes(ours)

    def _reorder(self, array: Array, *, halves: bool) -> Array:
        half = array.shape[0] // self.heads // 2
        inner = (half, 2) if halves else (2, half)
        split = array.reshape(self.heads, *inner, *array.shape[1:])
        return np.swapaxes(split, 1, 2).reshape(array.shape)


@dataclass(frozen=True)
class Chain:
    """Operations one after the other, the first one nearest to theirs."""

    ops: tuple[Op, ...]

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """All operations, in order."""
        arrays = list(theirs)
        for op in self.ops:
            arrays = op.to_ours(arrays)
        return arrays

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """All operations undone, last first."""
        arrays = list(ours)
        for op in reversed(self.ops):
            arrays = op.to_theirs(arrays)
        return arrays

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Through all operations, in order."""
        shapes = list(theirs)
        for op in self.ops:
            shapes = op.our_shapes(shapes)
        return shapes

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Back through all operations."""
        shapes = list(ours)
        for op in reversed(self.ops):
            shapes = op.their_shapes(shapes)
        return shapes


RENAME = Rename()
TRANSPOSE = Transpose()


@dataclass(frozen=True)
class Rule:
    """These leaves of ours are made of those tensors of theirs.

    Names may hold placeholders such as "{layer}"; `expand` fills them.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op = RENAME

    @staticmethod
    def one(ours: str, theirs: str, op: Op = RENAME) -> Rule:
        """The common case: one leaf, one tensor."""
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
    """Fills placeholders: `expand(rules, layer=2)` repeats each rule with "{layer}" twice.

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
    """Holds a table against what is there, in both directions.

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


def _require(condition: bool, expectation: str) -> None:
    if not condition:
        raise ValueError(expectation)
