"""Partition rules: where every leaf of a tree goes.

A leaf is placed by the first of these that is there: the partition rules (ordered pairs of a
regular expression, searched in the leaf's path, and a PartitionSpec; the first match wins), the
logical axis names that the model gave it (`nnx.Param(..., axes=("embed", "mlp"))`), or else
automatically: its longest dimension that `fsdp` divides, if it has 16,384 elements or more.

Nothing is dropped in silence. An axis that does not divide a dimension is a problem, and so is one
that splits the attention heads inside of a dimension and does not divide these. Heads are split by
the axes that carry them (`tp`): over an axis that carries something else (`fsdp`) a weight only
lies in parts, and is whole again before it is used. All problems are listed in one ShardingError. A
large leaf (16,384 elements or more) that is whole on every device only because a catch-all rule
without mesh axes took it, or because no dimension divides, is *unmatched*: reported always, an
error in strict mode. Specs are written without mesh axes of size 1, which is how the compiler gives
them back. An axis name that ends in "?" (`"embed?"`, the groups of a quantized weight's scale) is a
wish: it splits where it divides, and leaves the dimension whole elsewhere.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cairn.state.errors import ArgumentError
from cairn.state.partition_axis import AxisEntry, PartitionAxis
from cairn.state.paths import NamedLeaf, named_leaves
from cairn.state.sharding.mesh import MESH_AXES, mesh_of, mesh_text
from cairn.state.sharding.report import (
    LARGE_LEAF_ELEMENTS,
    LeafPlacement,
    ShardingReport,
    leaf_bytes,
)
from cairn.state.sharding.specs import entry_axes, short_spec, splitting_axes

__all__ = [
    "AUTOMATIC_MINIMUM_ELEMENTS",
    "DEFAULT_AXIS_RULES",
    "AxisRules",
    "PartitionRules",
    "axis_units",
    "check_rules",
    "module_plan",
    "plan",
    "spec_for",
]

PartitionRules = Sequence[tuple[str, PartitionSpec]]
AxisRules = Mapping[str, AxisEntry]

AUTOMATIC_MINIMUM_ELEMENTS = LARGE_LEAF_ELEMENTS
"""Leaves without a rule or axis names stay whole below this many elements."""

DEFAULT_AXIS_RULES: AxisRules = MappingProxyType(PartitionAxis().axis_rules())
"""Which mesh axis carries which logical axis of a model."""

_UNIT_LABELS = {"heads": "attention heads", "kv_heads": "key/value heads"}


def plan(
    tree: Any,
    mesh: Mesh | AbstractMesh,
    *,
    rules: PartitionRules | None = None,
    axis_rules: AxisRules | None = None,
    units: Mapping[str, int] | None = None,
) -> ShardingReport:
    """Decides where each leaf of a tree goes; moves nothing.

    Args:
        tree: arrays, or ShapeDtypeStructs.
        mesh: the mesh.
        rules: partition rules; None to go by the leaves' own axis names.
        axis_rules: mesh axis of each logical axis name, `DEFAULT_AXIS_RULES` by default.
        units: how many whole things a logical axis holds, such as {"heads": 9}: the mesh axes that
            carry it must divide these, not only the size of the dimension.
    """
    compiled = None if rules is None else [(re.compile(text), spec) for text, spec in rules]
    axis_rules = DEFAULT_AXIS_RULES if axis_rules is None else axis_rules
    leaves = tuple(
        _place(named, mesh, compiled, axis_rules, units or {}) for named in named_leaves(tree)
    )
    met = {leaf.rule for leaf in leaves}
    idle = tuple(text for text, _ in rules or () if text not in met and not _is_catch_all(text))
    return ShardingReport(mesh, leaves, idle)


def spec_for(
    path: str,
    shape: Sequence[int],
    rules: PartitionRules,
    mesh: Mesh | AbstractMesh,
) -> PartitionSpec:
    """Returns the PartitionSpec of one leaf by partition rules.

    Raises:
        ShardingError: if no rule matches, or if the spec does not fit the shape or the mesh.
    """
    leaf = jax.ShapeDtypeStruct(tuple(shape), np.dtype(np.uint8))
    compiled = [(re.compile(text), spec) for text, spec in rules]
    placed = _place(NamedLeaf(path, leaf, None, None), mesh, compiled, DEFAULT_AXIS_RULES, {})
    ShardingReport(mesh, (placed,)).raise_for_problems()
    return placed.spec


def _place(
    named: NamedLeaf,
    mesh: Mesh | AbstractMesh,
    rules: Sequence[tuple[re.Pattern[str], PartitionSpec]] | None,
    axis_rules: AxisRules,
    units: Mapping[str, int],
) -> LeafPlacement:
    shape = tuple(getattr(named.leaf, "shape", ()))
    axes = named.axes if named.axes is not None and len(named.axes) == len(shape) else None
    problems: list[str] = []
    no_entries: list[AxisEntry] = []
    if not shape:
        rule, entries = "scalar", no_entries
    elif rules is not None:
        rule, entries = _entries_by_rule(named.readable_path, shape, rules, problems)
    elif named.axes is not None:
        rule, entries = _entries_by_axes(named.axes, shape, mesh, axis_rules, problems)
    else:
        rule, entries = _entries_automatic(shape, mesh)
    shards = 1
    kept: list[AxisEntry] = []
    for dimension, entry in enumerate(entries):
        wished = axes[dimension] if axes is not None else None
        name = wished if isinstance(wished, str) else None
        # An axis name that ends in "?" is a wish: split where it divides, else whole.
        found = [] if name is not None and name.endswith("?") else problems
        divisor = _check_dimension(dimension, entry, shape, name, mesh, axis_rules, units, found)
        kept.append(splitting_axes(entry, mesh) if divisor is not None else None)
        shards *= divisor or 1
    nbytes = leaf_bytes(named.leaf)
    whole = shards == 1 and not problems and prod(shape) >= LARGE_LEAF_ELEMENTS
    return LeafPlacement(
        path=named.readable_path,
        shape=shape,
        dtype=str(getattr(named.leaf, "dtype", type(named.leaf).__name__)),
        rule=rule,
        spec=short_spec(kept),
        nbytes=nbytes,
        bytes_per_device=nbytes // shards,
        problems=tuple(problems),
        unmatched=_unmatched(rule, entries, shape, mesh) if whole else None,
    )


def _unmatched(
    rule: str, entries: Sequence[AxisEntry], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> str | None:
    """Says why a large leaf is whole on every device, if no one asked for that."""
    if rule == "automatic" and mesh.shape.get("fsdp", 1) > 1:
        size = mesh.shape["fsdp"]
        return f"large, and fsdp={size} divides none of its dimensions (shape {shape})"
    named_nothing = not any(entry is not None for entry in entries)
    if mesh.size > 1 and named_nothing and _is_catch_all(rule):
        return f"large, and only the catch-all rule {rule!r} takes it (shape {shape})"
    return None


def _is_catch_all(pattern: str) -> bool:
    """Says whether a rule's pattern matches any path."""
    try:
        return re.search(pattern, "") is not None
    except re.error:  # "axes (embed, mlp)" and the like are no patterns
        return False


def _entries_by_rule(
    path: str,
    shape: tuple[int, ...],
    rules: Sequence[tuple[re.Pattern[str], PartitionSpec]],
    problems: list[str],
) -> tuple[str, list[AxisEntry]]:
    for pattern, spec in rules:
        if pattern.search(path):
            if len(spec) > len(shape):
                problems.append(
                    f"rule {pattern.pattern!r} names {len(spec)} dimensions (the leaf has {shape})"
                )
                return pattern.pattern, []
            return pattern.pattern, list(spec)
    problems.append(f"no partition rule matches (shape {shape})")
    return "none", []


def _entries_by_axes(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    axis_rules: AxisRules,
    problems: list[str],
) -> tuple[str, list[AxisEntry]]:
    rule = f"axes ({', '.join(map(str, axes))})"
    if len(axes) != len(shape):
        problems.append(f"{len(axes)} axis names {axes} (the leaf has shape {shape})")
        return rule, []
    taken: set[str] = set()
    entries: list[AxisEntry] = []
    # Flax's own names may be those of mesh axes, and several for a dimension.
    carriers = {**{name: name for name in mesh.axis_names}, **axis_rules}
    for wished in axes:
        names = [name.removesuffix("?") for name in entry_axes(wished)]
        unknown = [name for name in names if name not in carriers]
        problems += [
            f"unknown axis name {name!r} (known: {', '.join(carriers)})" for name in unknown
        ]
        found = [carriers[name] for name in names if name in carriers]
        entry = tuple(axis for carrier in found for axis in entry_axes(carrier))
        # One mesh axis can split a leaf once: the first dimension that asks for it has it.
        free = tuple(axis for axis in entry_axes(entry) if axis not in taken)
        taken.update(free)
        entries.append(free[0] if len(free) == 1 else free or None)
    return rule, entries


def _entries_automatic(
    shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> tuple[str, list[AxisEntry]]:
    size = mesh.shape.get("fsdp", 1)
    entries: list[AxisEntry] = [None] * len(shape)
    fitting = [index for index, length in enumerate(shape) if length % size == 0]
    if size > 1 and fitting and prod(shape) >= AUTOMATIC_MINIMUM_ELEMENTS:
        entries[max(fitting, key=lambda index: shape[index])] = "fsdp"
    return "automatic", entries


def _check_dimension(
    dimension: int,
    entry: AxisEntry,
    shape: tuple[int, ...],
    name: str | None,
    mesh: Mesh | AbstractMesh,
    axis_rules: AxisRules,
    units: Mapping[str, int],
    problems: list[str],
) -> int | None:
    """Returns how many parts a dimension is cut into, or None if it cannot be."""
    mesh_axes = entry_axes(entry)
    unknown = [axis for axis in mesh_axes if axis not in mesh.shape]
    if unknown:
        problems.append(f"unknown mesh axis {unknown[0]!r} (the mesh has {mesh_text(mesh)})")
        return None
    parts = _parts(mesh_axes, mesh)
    if parts == 1:
        return 1
    splitting = _splitting(mesh_axes, name, axis_rules)
    if name is not None and units.get(name, 0) % _parts(splitting, mesh):
        label = _UNIT_LABELS.get(name, name)
        by = _product_text(splitting, mesh)
        problems.append(f"{units[name]} {label} do not divide by {by} (shape {shape})")
        return None
    if shape[dimension] % parts:
        problems.append(
            f"a dimension of {shape[dimension]} does not divide by "
            f"{_product_text(mesh_axes, mesh)} (dimension {dimension} of {shape})"
        )
        return None
    return parts


def _splitting(
    mesh_axes: Sequence[str], name: str | None, axis_rules: AxisRules
) -> tuple[str, ...]:
    """Those of the mesh axes that split what a logical axis holds: its own, and unknown ones."""
    own = entry_axes(axis_rules.get(name)) if name is not None else ()
    carried = {axis for entry in axis_rules.values() for axis in entry_axes(entry)}
    known = carried.union(MESH_AXES)
    return tuple(axis for axis in mesh_axes if axis in own or axis not in known)


def _parts(mesh_axes: Iterable[str], mesh: Mesh | AbstractMesh) -> int:
    return int(prod(mesh.shape[axis] for axis in mesh_axes))


def _product_text(mesh_axes: Sequence[str], mesh: Mesh | AbstractMesh) -> str:
    return "*".join(mesh_axes) + f"={_parts(mesh_axes, mesh)}"


def module_plan(
    tree: Any,
    config: Any,
    partition_rules: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> ShardingReport:
    """Decides where the leaves of a model's state go.

    Rules come from the argument, else the config, else the leaves' own axis names, carried by the
    mesh axes of the config's `partition_axis`; the mesh from the argument, else from where the
    leaves are, else from the config.

    Raises:
        ArgumentError: if the rules are none, if nothing names a mesh, or if it is none.
    """
    rules: PartitionRules | None = check_rules(partition_rules)
    if rules is None and config is not None:
        rules = check_rules(config.get_partition_rules())
    if mesh is None:
        mesh = mesh_of(tree) or getattr(config, "mesh", None)
    if mesh is None:
        raise ArgumentError(
            path="mesh",
            expected="a mesh: as an argument, in the model's config, or that the leaves are on",
            found="none of them",
        )
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ArgumentError(
            path="mesh",
            expected="a jax.sharding.Mesh",
            found=repr(mesh),
            next_step="state.make_mesh(dims) makes one",
        )
    axis = getattr(config, "partition_axis", None)
    axis_rules = None if axis is None else axis.axis_rules()
    return plan(tree, mesh, rules=rules, axis_rules=axis_rules, units=axis_units(config))


def axis_units(config: Any) -> dict[str, int]:
    """Returns what each logical axis of a model holds in whole numbers, from its config.

    A config says so itself with `axis_units`, a mapping such as {"heads": 9, "kv_heads": 3}; else
    `num_attention_heads` and `num_key_value_heads` are taken, where they are there.
    """
    own = getattr(config, "axis_units", None)
    if own is not None:
        return dict(own() if callable(own) else own)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    found = {"heads": heads, "kv_heads": kv_heads}
    return {name: int(count) for name, count in found.items() if count is not None}


def check_rules(rules: Any) -> PartitionRules | None:
    """Checks that partition rules are pairs of a regular expression and a PartitionSpec.

    Raises:
        ArgumentError: if they are not.
    """
    if rules is None:
        return None
    checked: list[tuple[str, PartitionSpec]] = []
    for number, rule in enumerate(rules):
        if (
            not isinstance(rule, tuple | list)
            or len(rule) != 2
            or not isinstance(rule[0], str)
            or not isinstance(rule[1], PartitionSpec)
        ):
            raise ArgumentError(
                path=f"partition_rules[{number}]",
                expected="a pair (regular expression, PartitionSpec)",
                found=repr(rule),
            )
        try:
            re.compile(rule[0])
        except re.error as error:
            raise ArgumentError(
                path=f"partition_rules[{number}]",
                expected="a regular expression",
                found=f"{rule[0]!r}: {error}",
            ) from error
        checked.append((rule[0], rule[1]))
    return tuple(checked)
