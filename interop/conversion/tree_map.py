"""Maps from the stored leaves of one tree to the leaves of another, with operations.

A map is declared with placeholders. `resolve` turns it into the rules that conversions use, for the
leaves that exist, and lists everything that does not fit before any value is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any, Final, NamedTuple

from cairn.counts import count_text
from cairn.interop.conversion.inverses import inverse
from cairn.interop.conversion.leaf_patterns import LeafPattern
from cairn.interop.conversion.ops import Op, Shape
from cairn.interop.conversion.rules import Rule
from cairn.interop.conversion.stored import Step, Stored, operation, other_names
from cairn.interop.errors import ArgumentError

__all__ = ["MappedLeaves", "ResolvedMap", "TreeMap"]

_SHOWN: Final = 3
"""Most paths of a rule in a message."""

_ELEMENTWISE: Final = frozenset({"transpose", "reshape", "pad", "cut", "scale", "add"})
"""Operations on each leaf by itself, which keep the number and order of leaves."""


class MappedLeaves(NamedTuple):
    """Leaves that are made of stored leaves.

    Attributes:
        rule: the rule, with the stored leaves as its tensors.
        casts: True if the leaves may have another dtype than the stored ones.
        computes: True if the stored leaves must be floating.
    """

    rule: Rule
    casts: bool = False
    computes: bool = False


@dataclass
class ResolvedMap:
    """A map for the leaves that exist.

    Attributes:
        leaves: the leaves that are made of stored ones.
        new: paths of the other leaves -> the array or function that the map has for them.
        problems: what does not fit, one line each.
    """

    leaves: list[MappedLeaves] = field(default_factory=list)
    new: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TreeMap:
    """Map from stored leaves to the leaves of a target, for `load` and `Checkpointer.restore`.

    Paths begin with the item's name, such as "model/layers/0/kernel". Leaves of the target that the
    map does not name are loaded from the stored leaf of the same path. Every stored leaf of an item
    that is read is used once, or named in `left_out`. All that does not fit is one error.

        TreeMap(
            {
                "model/layers/{path:path}": Stored("model/layers_{layer}/{path:path}").stack(),
                ("model/q", "model/k"): Stored("model/qk").split(8, 8, axis=1),
                "model/wte": "model/embed/embedding",
            },
            new={"model/head/kernel": lambda path, leaf: jnp.zeros(leaf.shape, leaf.dtype)},
            left_out=["model/old_head/{path:path}"],
        )

    Attributes:
        leaves: path of a leaf of the target, or a tuple of paths -> the stored leaves that they
            are made of. All are patterns, see `Stored`. A leaf that a pattern of several rules
            matches must have its stored leaf by one of them only.
        new: pattern of leaves that nothing stored becomes -> their value: an array, or a function
            (path, leaf of the target) -> array. The array is cast to the leaf's dtype within
            floating dtypes and within integers, and gets its sharding. In a job of several
            processes it must be the same on all.
        left_out: patterns of stored leaves that are not loaded.

    Raises:
        ArgumentError: a pattern is malformed, or the placeholders of a rule do not fit together.
    """

    leaves: Mapping[str | tuple[str, ...], str | Stored] = field(default_factory=dict)
    new: Mapping[str, Any] = field(default_factory=dict)
    left_out: Collection[str] = ()
    _inverted: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.left_out, str):
            raise ArgumentError(path="left_out", expected="a list of paths", found="a single text")
        for pattern in (*self.new, *self.left_out):
            LeafPattern(pattern)
        self._entries()

    def inverse(self, new: Mapping[str, Any] | None = None) -> TreeMap:
        """Return the map from the target's tree back to the stored one.

        What this map calls new, the inverse leaves out. `scale` and `add` are undone within one
        rounding, everything else bit for bit.

        Args:
            new: values of the leaves that this map leaves out, as for `TreeMap`.
        """
        return replace(
            self, new=dict(new or {}), left_out=(*self.new,), _inverted=not self._inverted
        )

    def resolve(self, stored: Mapping[str, Shape], target: Mapping[str, Shape]) -> ResolvedMap:
        """Return this map for the leaves that exist; `problems` lists all that does not fit.

        Args:
            stored: path -> shape of every stored leaf.
            target: path -> shape of every leaf of the target.
        """
        resolved = ResolvedMap()
        left_out = _matching(self.left_out, stored, "left_out", "stored leaf", resolved.problems)
        new = _matching(self.new, target, "new", "leaf of the target", resolved.problems)
        resolved.new = {path: self.new[pattern] for path, pattern in new.items()}
        usable = _Leaves({**stored}, left_out)
        fillable = _Leaves({**target}, new)
        uses = _Uses({}, dict.fromkeys(new, "new"), resolved.problems)
        partial: list[_Binding] = []
        sides = (fillable, usable) if self._inverted else (usable, fillable)
        for entry in self._entries():
            source = entry.source
            bindings = entry.bindings(*sides)
            if not bindings:
                resolved.problems.append(f"{entry}: no leaf has such a path")
            for binding in bindings:
                if not binding.is_whole:
                    partial.append(binding)
                    continue
                rule = _rule(binding, source, stored, target, self._inverted, resolved.problems)
                if uses.add(rule) and rule.op is not None:
                    concrete = Rule(rule.leaves, rule.tensors, rule.op)
                    resolved.leaves.append(MappedLeaves(concrete, source.casts, source.computes))
        uses.explain(partial, usable, fillable, self._inverted)
        for path in target:
            if path in uses.written:
                continue
            if path not in stored:
                resolved.problems.append(f"{path}: expected by the target, neither stored nor new")
            elif path in left_out:
                resolved.problems.append(f"{path}: expected by the target, the map leaves it out")
            elif path in uses.read:
                resolved.problems.append(
                    f"{path}: expected by the target, its stored leaf becomes {uses.read[path]}"
                )
            else:
                resolved.leaves.append(MappedLeaves(Rule.one(path, path)))
                uses.read[path] = uses.written[path] = path
        items = {path.partition("/")[0] for path in (*target, *uses.read)}
        resolved.problems += [
            f"{path}: stored, neither used nor left out"
            for path in stored
            if path not in uses.read and path not in left_out and path.partition("/")[0] in items
        ]
        return resolved

    def _entries(self) -> list[_Entry]:
        return [
            _Entry.of((leaves,) if isinstance(leaves, str) else tuple(leaves), source)
            for leaves, source in self.leaves.items()
        ]


class _Leaves(NamedTuple):
    """Leaves of one side of a map.

    Attributes:
        shapes: path -> shape of all leaves.
        excluded: those that no rule may use, which are left out or new.
    """

    shapes: Mapping[str, Shape]
    excluded: Mapping[str, str]


class _Binding(NamedTuple):
    """Leaves that one set of values of a rule's placeholders names.

    Attributes:
        leaves: paths on the side of the rule's keys.
        tensors: paths on the other side.
        no_leaves: those of `leaves` that do not exist.
        no_tensors: those of `tensors` that do not exist.
        layers: number of tensors that differ in the placeholder that only they have; None: they
            have none.
        gaps: what is wrong with the numbers of layers.
        literal: True if the rule has no placeholder.
    """

    leaves: tuple[str, ...]
    tensors: tuple[str, ...]
    no_leaves: tuple[str, ...]
    no_tensors: tuple[str, ...]
    layers: int | None
    gaps: tuple[str, ...]
    literal: bool

    @property
    def is_whole(self) -> bool:
        return not self.no_leaves and not self.no_tensors


class _Entry(NamedTuple):
    """Rule of a map, with placeholders.

    Attributes:
        patterns: patterns of the leaves.
        source: what they are made of.
        shared: placeholders that both have.
        counted: placeholder that only the stored leaves have, and that only the target has.
    """

    patterns: tuple[LeafPattern, ...]
    source: Stored
    shared: tuple[str, ...]
    counted: tuple[str | None, str | None]

    @staticmethod
    def of(leaves: tuple[str, ...], source: Any) -> _Entry:
        """Return a rule of a map.

        Raises:
            ArgumentError: its placeholders do not fit together.
        """
        if not leaves or not isinstance(source, str | Stored):
            raise ArgumentError(
                path=f"map, {', '.join(map(str, leaves))}",
                expected="a stored path, or Stored(path, ...) with operations",
                found=repr(source),
                next_step="values of new leaves go into `new`",
            )
        patterns = tuple(map(LeafPattern, leaves))
        if len({pattern.names for pattern in patterns}) > 1:
            raise other_names("map", leaves)
        stored = Stored(source) if isinstance(source, str) else source
        in_target, in_stored = patterns[0].names, stored.patterns[0].names
        counted = []
        for names, step in ((in_stored - in_target, "stack"), (in_target - in_stored, "unstack")):
            if len(names) > 1 or (names and step not in {name for name, _ in stored.steps}):
                raise ArgumentError(
                    path=f"map, {', '.join(leaves)}",
                    expected=f"the same placeholders on both sides, or one more and {step}(axis)",
                    found=f"{', '.join(f'{{{name}}}' for name in sorted(names))} on one side of "
                    f"{stored!r}",
                )
            counted.append(next(iter(names), None))
        for name, steps, way in (
            (counted[0], _before(stored.steps, "stack"), "before"),
            (counted[1], _before(stored.steps[::-1], "unstack"), "after"),
        ):
            if name is not None and (others := sorted({*steps} - _ELEMENTWISE)):
                step = "stack" if way == "before" else "unstack"
                raise ArgumentError(
                    path=f"map, {', '.join(leaves)}",
                    expected=f"only {', '.join(sorted(_ELEMENTWISE))} {way} {step}",
                    found=f"{', '.join(others)} in {stored!r}",
                )
        return _Entry(
            patterns, stored, tuple(sorted(in_target & in_stored)), (counted[0], counted[1])
        )

    def __str__(self) -> str:
        texts = (pattern.text for pattern in self.patterns)
        return f"{', '.join(texts)} from {self.source!r}"

    def bindings(self, stored: _Leaves, target: _Leaves) -> list[_Binding]:
        """Return the leaves that each set of values of the shared placeholders names."""
        tensors = self._side(self.source.patterns, self.counted[0], stored)
        leaves = self._side(self.patterns, self.counted[1], target)
        bindings = []
        for key in dict.fromkeys([*leaves, *tensors, *([] if self.shared else [()])]):
            values = dict(zip(self.shared, key, strict=True))
            numbers, gaps = _in_order(tensors.get(key, ()), self.counted[0])
            indices, more = _in_order(leaves.get(key, ()), self.counted[1])
            inputs = _paths(self.source.patterns, values, self.counted[0], numbers)
            outputs = _paths(self.patterns, values, self.counted[1], indices)
            gaps += _holes(self.source.patterns, values, self.counted[0], numbers, stored)
            more += _holes(self.patterns, values, self.counted[1], indices, target)
            bindings.append(
                _Binding(
                    outputs,
                    inputs,
                    tuple(path for path in outputs if not _usable(path, target)),
                    tuple(path for path in inputs if not _usable(path, stored)),
                    len(numbers) if self.counted[0] is not None else None,
                    (*gaps, *more),
                    not any(pattern.names for pattern in (*self.patterns, *self.source.patterns)),
                )
            )
        return bindings

    def _side(
        self, patterns: Sequence[LeafPattern], counted: str | None, leaves: _Leaves
    ) -> dict[tuple[str, ...], dict[str, None]]:
        """Return, by the values of the shared placeholders, those of the counted one."""
        values: dict[tuple[str, ...], dict[str, None]] = {}
        for path in leaves.shapes:
            if path in leaves.excluded:
                continue
            for pattern in patterns:
                if (bound := pattern.match(path)) is not None:
                    key = tuple(bound[name] for name in self.shared)
                    values.setdefault(key, {})[bound[counted] if counted else ""] = None
        return values


def _before(steps: Sequence[Step], name: str) -> list[str]:
    """Return the names of the steps before the first one of a name."""
    return [step for step, _ in takewhile(lambda step: step[0] != name, steps)]


class _Draft(NamedTuple):
    """A rule whose operation may not fit.

    Attributes:
        leaves: leaves of the target.
        tensors: stored leaves.
        op: the operation; None if it does not fit.
    """

    leaves: tuple[str, ...]
    tensors: tuple[str, ...]
    op: Op | None


@dataclass
class _Uses:
    """What becomes of each leaf.

    Attributes:
        read: stored leaf -> what it becomes.
        written: leaf of the target -> what it is made of.
        problems: list to which problems are added.
    """

    read: dict[str, str]
    written: dict[str, str]
    problems: list[str]

    def add(self, rule: _Draft) -> bool:
        """Note the leaves of a rule; return False if another rule has one of them."""
        outputs, inputs = ", ".join(rule.leaves), ", ".join(rule.tensors)
        before = len(self.problems)
        self.problems += [
            f"{path}: made of {self.written[path]}, and again of {inputs}"
            for path in rule.leaves
            if path in self.written
        ]
        self.problems += [
            f"{path}: used for {self.read[path]}, and again for {outputs}"
            for path in rule.tensors
            if path in self.read
        ]
        self.written.update(dict.fromkeys(rule.leaves, inputs))
        self.read.update(dict.fromkeys(rule.tensors, outputs))
        return len(self.problems) == before

    def explain(
        self, bindings: Iterable[_Binding], stored: _Leaves, target: _Leaves, inverted: bool
    ) -> None:
        """Add a problem for each rule that has leaves on one side only, unless others have them."""
        for binding in bindings:
            leaves, tensors = binding.leaves, binding.tensors
            no_leaves, no_tensors = binding.no_leaves, binding.no_tensors
            if inverted:
                leaves, tensors, no_leaves, no_tensors = tensors, leaves, no_tensors, no_leaves
            has_leaves = [path for path in leaves if path not in no_leaves]
            has_tensors = [path for path in tensors if path not in no_tensors]
            idle = [path for path in has_leaves if path not in self.written]
            unused = [path for path in has_tensors if path not in self.read]
            if not idle and not unused and not binding.literal:
                continue
            lacks = [
                f"{path} in `new` too" if path in target.excluded else f"no {path} in the target"
                for path in no_leaves
            ] + [
                f"{path} in `left_out`" if path in stored.excluded else f"no {path} stored"
                for path in no_tensors
            ]
            self.problems.append(
                f"{_listed(leaves)} from {_listed(tensors)}: found {_listed(lacks)}"
            )
            self.written.update(dict.fromkeys(idle, "nothing"))
            self.read.update(dict.fromkeys(unused, "nothing"))


def _rule(
    binding: _Binding,
    source: Stored,
    stored: Mapping[str, Shape],
    target: Mapping[str, Shape],
    inverted: bool,
    problems: list[str],
) -> _Draft:
    """Return the rule of a binding; what does not fit is added to `problems`."""
    leaves, tensors = binding.leaves, binding.tensors
    shapes = target if inverted else stored
    outputs, inputs = (tensors, leaves) if inverted else (leaves, tensors)
    name = f"{_listed(outputs)} from {_listed(inputs)}"
    problems += [f"{name}: {gap}" for gap in binding.gaps]
    try:
        op = operation(source.steps, [shapes[path] for path in tensors], binding.layers)
        op = inverse(op) if inverted else op
        shapes_made = op.leaf_shapes([stored[path] for path in inputs])
    except ValueError as exc:
        problems.append(f"{name}: expected {exc}")
        return _Draft(outputs, inputs, None)
    if len(shapes_made) != len(outputs):
        problems.append(
            f"{name}: expected {count_text(len(outputs), 'leaf')} as in the target, "
            f"the map makes {len(shapes_made)}"
        )
        return _Draft(outputs, inputs, None)
    wrong = [
        f"{path}: expected shape {target[path]}, the map makes {shape} from {_listed(inputs)}"
        for path, shape in zip(outputs, shapes_made, strict=True)
        if tuple(target[path]) != tuple(shape)
    ]
    problems += wrong
    return _Draft(outputs, inputs, None if wrong or binding.gaps else op)


def _matching(
    patterns: Iterable[str], paths: Iterable[str], argument: str, kind: str, problems: list[str]
) -> dict[str, str]:
    """Return the paths that patterns match, each with the first of its patterns."""
    listed = {text: LeafPattern(text) for text in patterns}
    matching: dict[str, str] = {}
    idle = {*listed}
    for path in paths:
        for text, pattern in listed.items():
            if pattern.match(path) is not None:
                matching.setdefault(path, text)
                idle.discard(text)
    problems += [f"{text}: in `{argument}`, no {kind} has such a path" for text in sorted(idle)]
    return matching


def _in_order(numbers: Iterable[str], counted: str | None) -> tuple[list[str], tuple[str, ...]]:
    """Return the numbers that a placeholder stands for, in order, and what is wrong with them."""
    texts = [*numbers]
    if counted is None:
        return [], ()
    if not all(text.isdecimal() for text in texts):
        listed = _listed(sorted(texts))
        return texts, (f"expected numbers for {{{counted}}}, found {listed}",)
    return sorted(texts, key=int), ()


def _holes(
    patterns: Sequence[LeafPattern],
    values: Mapping[str, str],
    counted: str | None,
    numbers: Sequence[str],
    leaves: _Leaves,
) -> tuple[str, ...]:
    """Return a line for numbers that are missing between others and that the map does not name."""
    if counted is None or not all(number.isdecimal() for number in numbers):
        return ()
    for low, high in pairwise(map(int, numbers)):
        for number in range(low + 1, high):
            path = patterns[0].fill({**values, counted: str(number)})
            if path not in leaves.excluded:
                return (f"expected {path} between {low} and {high}, found none",)
    return ()


def _paths(
    patterns: Sequence[LeafPattern],
    values: Mapping[str, str],
    counted: str | None,
    numbers: Sequence[str],
) -> tuple[str, ...]:
    """Return the paths that patterns name, those of a pattern together."""
    return tuple(
        pattern.fill({**values, **more})
        for pattern in patterns
        for more in ([{counted: number} for number in numbers] if counted and numbers else [{}])
    )


def _usable(path: str, leaves: _Leaves) -> bool:
    return path in leaves.shapes and path not in leaves.excluded


def _listed(paths: Sequence[str]) -> str:
    more = f", … ({len(paths)})" if len(paths) > _SHOWN else ""
    return f"{', '.join(paths[:_SHOWN])}{more}"
