"""Placement of one leaf on a mesh, from the sizes of both.

A partition rule places it, or else its logical axis names, or else an automatic choice;
`state.sharding.rules` describes the three.
"""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from cairn.counts import count_text
from cairn.interop.partition_axis import MESH_AXES, AxisEntry, PartitionAxis, entry_axes
from cairn.interop.placement.specs import (
    Entries,
    MeshSizes,
    mesh_text,
    shard_count,
    splitting_axes,
    without_trailing_nones,
)

__all__ = [
    "AUTOMATIC",
    "DEFAULT_AXIS_RULES",
    "LARGE_LEAF_ELEMENTS",
    "AxisRules",
    "ResolvedSpec",
    "RuleMatch",
    "SpecProblem",
    "axis_units",
    "resolve_spec",
]

AxisRules = Mapping[str, AxisEntry]

LARGE_LEAF_ELEMENTS = 16_384
"""Size in elements below which a leaf is replicated without a remark in a plan."""

DEFAULT_AXIS_RULES: AxisRules = MappingProxyType(PartitionAxis().axis_rules())
"""Mesh axes of each logical axis of a model."""

AUTOMATIC = "automatic"

_UNIT_LABELS = {"heads": "attention heads", "kv_heads": "key/value heads"}


class RuleMatch(NamedTuple):
    """Partition rule that matches a leaf's path.

    Attributes:
        pattern: pattern of the first rule that matches; None if none does.
        entries: spec of that rule.
        catch_all: whether the pattern matches any path.
    """

    pattern: str | None
    entries: Sequence[AxisEntry] = ()
    catch_all: bool = False


class SpecProblem(NamedTuple):
    """Reason why a leaf can't be placed as requested.

    Attributes:
        text: the reason in words.
        dimension: index of the dimension that does not fit; None if the problem is another.
        axes: the mesh axes that would split that dimension.
    """

    text: str
    dimension: int | None = None
    axes: tuple[str, ...] = ()


class ResolvedSpec(NamedTuple):
    """Placement of a leaf.

    Attributes:
        rule: the pattern that matched, "axes (...)", "automatic" or "scalar".
        entries: mesh axes of each dimension, without those of size 1 and those that do not fit.
        problems: mesh axes that do not fit, with the reasons.
        unmatched: why a large leaf is replicated without a rule that says so; None: it is not.
    """

    rule: str
    entries: Entries
    problems: tuple[SpecProblem, ...] = ()
    unmatched: str | None = None


def resolve_spec(
    shape: tuple[int, ...],
    mesh: MeshSizes,
    *,
    match: RuleMatch | None = None,
    axes: tuple[str | None, ...] | None = None,
    axis_rules: AxisRules = DEFAULT_AXIS_RULES,
    units: Mapping[str, int] = MappingProxyType({}),
) -> ResolvedSpec:
    """Return the placement of a leaf.

    Args:
        shape: shape of the leaf.
        mesh: devices along each mesh axis.
        match: the partition rule for its path; None if there are no partition rules.
        axes: its logical axis names; None if it has none.
        axis_rules: mesh axes of each logical axis name.
        units: number of indivisible units (such as heads) of a logical axis; no shard gets a
            fraction.
    """
    problems: list[SpecProblem] = []
    no_entries: list[AxisEntry] = []
    if not shape:
        rule, entries = "scalar", no_entries
    elif match is not None:
        rule, entries = _entries_by_rule(match, shape, problems)
    elif axes is not None:
        rule, entries = _entries_by_axes(axes, shape, mesh, axis_rules, problems)
    else:
        rule, entries = _entries_automatic(shape, mesh)
    names = axes if axes is not None and len(axes) == len(shape) else None
    shards = 1
    kept: list[AxisEntry] = []
    for dimension, entry in enumerate(entries):
        wished = names[dimension] if names is not None else None
        name = wished if isinstance(wished, str) else None
        split = _SplitDimension(dimension, entry_axes(entry), shape, name)
        problem = _problem(split, mesh, axis_rules, units)
        # An axis name that ends in "?" is optional: it splits only if it divides the dimension.
        if problem is not None and not (name is not None and name.endswith("?")):
            problems.append(problem)
        kept.append(splitting_axes(entry, mesh) if problem is None else None)
        shards *= 1 if problem is not None else shard_count(split.axes, mesh)
    whole = shards == 1 and not problems and prod(shape) >= LARGE_LEAF_ELEMENTS
    catch_all = match is not None and match.catch_all
    unmatched = _unmatched(rule, entries, shape, mesh, catch_all) if whole else None
    return ResolvedSpec(rule, without_trailing_nones(kept), tuple(problems), unmatched)


def axis_units(config: Any) -> dict[str, int]:
    """Return the number of indivisible units of each logical axis, from a model's config.

    They are the config's `axis_units`, a mapping such as {"heads": 9, "kv_heads": 3}, if it has
    that attribute; else its `num_attention_heads` and `num_key_value_heads`, if it has them.
    """
    own = getattr(config, "axis_units", None)
    if own is not None:
        return dict(own() if callable(own) else own)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    counts = {"heads": heads, "kv_heads": kv_heads}
    return {name: int(count) for name, count in counts.items() if count is not None}


def _unmatched(
    rule: str,
    entries: Sequence[AxisEntry],
    shape: tuple[int, ...],
    mesh: MeshSizes,
    catch_all: bool,
) -> str | None:
    """Return why a large leaf is replicated; None if it is not, or a rule says so."""
    if rule == AUTOMATIC and mesh.get("fsdp", 1) > 1:
        return f"large, and fsdp={mesh['fsdp']} divides none of its dimensions (shape {shape})"
    named_nothing = not any(entry is not None for entry in entries)
    if prod(mesh.values()) > 1 and named_nothing and catch_all:
        return f"large, and only the catch-all rule {rule!r} takes it (shape {shape})"
    return None


def _entries_by_rule(
    match: RuleMatch, shape: tuple[int, ...], problems: list[SpecProblem]
) -> tuple[str, list[AxisEntry]]:
    if match.pattern is None:
        problems.append(SpecProblem(f"no partition rule matches (shape {shape})"))
        return "none", []
    count = len(match.entries)
    if count > len(shape):
        text = (
            f"rule {match.pattern!r} names {count_text(count, 'dimension')} (the leaf has {shape})"
        )
        problems.append(SpecProblem(text))
        return match.pattern, []
    return match.pattern, list(match.entries)


def _entries_by_axes(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    mesh: MeshSizes,
    axis_rules: AxisRules,
    problems: list[SpecProblem],
) -> tuple[str, list[AxisEntry]]:
    rule = f"axes ({', '.join(map(str, axes))})"
    if len(axes) != len(shape):
        problems.append(
            SpecProblem(f"{count_text(len(axes), 'axis name')} {axes} (the leaf has shape {shape})")
        )
        return rule, []
    taken: set[str] = set()
    entries: list[AxisEntry] = []
    # With Flax a name may itself be a mesh axis, and a dimension may have several names.
    carriers = {**{name: name for name in mesh}, **axis_rules}
    for dimension, wished in enumerate(axes):
        names = [name.removesuffix("?") for name in entry_axes(wished)]
        listed = ", ".join(carriers)
        problems += [
            SpecProblem(f"unknown axis name {name!r} (known: {listed})", dimension)
            for name in names
            if name not in carriers
        ]
        carried = [carriers[name] for name in names if name in carriers]
        entry = tuple(axis for carrier in carried for axis in entry_axes(carrier))
        # A mesh axis can split only one dimension of a leaf: the first that maps to it.
        free = tuple(axis for axis in entry_axes(entry) if axis not in taken)
        taken.update(free)
        entries.append(free[0] if len(free) == 1 else free or None)
    return rule, entries


def _entries_automatic(shape: tuple[int, ...], mesh: MeshSizes) -> tuple[str, list[AxisEntry]]:
    size = mesh.get("fsdp", 1)
    entries: list[AxisEntry] = [None] * len(shape)
    fitting = [index for index, length in enumerate(shape) if length % size == 0]
    if size > 1 and fitting and prod(shape) >= LARGE_LEAF_ELEMENTS:
        entries[max(fitting, key=lambda index: shape[index])] = "fsdp"
    return AUTOMATIC, entries


class _SplitDimension(NamedTuple):
    """A dimension of a leaf, and the mesh axes that should split it."""

    dimension: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    name: str | None


def _problem(
    split: _SplitDimension, mesh: MeshSizes, axis_rules: AxisRules, units: Mapping[str, int]
) -> SpecProblem | None:
    """Return why mesh axes can't split a dimension; None if they can."""
    dimension, axes, shape, name = split
    unknown = [axis for axis in axes if axis not in mesh]
    if unknown:
        text = f"unknown mesh axis {unknown[0]!r} (the mesh has {mesh_text(mesh)})"
        return SpecProblem(text, dimension, axes)
    parts = shard_count(axes, mesh)
    if parts == 1:
        return None
    if name is not None:
        # A logical axis names its mesh axes; the mesh may lack some of them.
        own = entry_axes(axis_rules.get(name))
        carried = {axis for entry in axis_rules.values() for axis in entry_axes(entry)}
        usual = carried.union(MESH_AXES)
        splitting = tuple(axis for axis in axes if axis in own or axis not in usual)
        if units.get(name, 0) % shard_count(splitting, mesh):
            label = _UNIT_LABELS.get(name, name)
            by = _product_text(splitting, mesh)
            text = f"{units[name]} {label} do not divide by {by} (shape {shape})"
            return SpecProblem(text, dimension, splitting)
    if shape[dimension] % parts:
        by = _product_text(axes, mesh)
        text = f"a dimension of {shape[dimension]} does not divide by {by} "
        return SpecProblem(f"{text}(dimension {dimension} of {shape})", dimension, axes)
    return None


def _product_text(axes: Sequence[str], mesh: MeshSizes) -> str:
    return "*".join(axes) + f"={shard_count(axes, mesh)}"
