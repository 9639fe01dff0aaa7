"""Partition rules: the spec of every leaf of a tree on a mesh.

The spec of a leaf comes from the first of these that exists:

1. partition rules: ordered pairs of a regular expression, searched in the leaf's path, and a
   PartitionSpec; the first match wins;
2. the logical axis names that the model gives the leaf (`nnx.Param(..., axes=("embed", "mlp"))`);
3. an automatic choice: the longest dimension that `fsdp` divides, if the leaf has 16,384 elements
   or more.

It is a problem if mesh axes do not divide a dimension, or if the axes that carry attention heads
(`tp`) do not divide the number of heads. Other axes (`fsdp`) may divide heads, since a weight is
gathered over them before it is used. One ShardingError lists all problems.

A large leaf (16,384 elements or more) is *unmatched* if it is replicated only because a catch-all
rule without mesh axes matches, or because no dimension can be divided. This is always reported, and
an error in strict mode.

Specs omit mesh axes of size 1, as the compiler does. An axis name that ends in "?" (`"embed?"`, the
groups of a quantized weight's scale) is optional: if its mesh axes do not divide the dimension, it
stays whole.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cairn.interop.errors import ArgumentError
from cairn.interop.partition_axis import entry_axes
from cairn.interop.placement.rules import (
    DEFAULT_AXIS_RULES,
    AxisRules,
    RuleMatch,
    axis_units,
    resolve_spec,
)
from cairn.interop.placement.specs import Entries, shard_count
from cairn.state.paths import NamedLeaf, named_leaves
from cairn.state.sharding.mesh import mesh_of
from cairn.state.sharding.report import LeafPlacement, ShardingReport, leaf_bytes

__all__ = [
    "PartitionRules",
    "check_rules",
    "module_plan",
    "plan",
]

PartitionRules = Sequence[tuple[str, PartitionSpec]]


class _Rule(NamedTuple):
    """Partition rule with its compiled pattern."""

    pattern: re.Pattern[str]
    entries: Entries
    catch_all: bool


def plan(
    tree: Any,
    mesh: Mesh | AbstractMesh,
    *,
    rules: PartitionRules | None = None,
    axis_rules: AxisRules | None = None,
    units: Mapping[str, int] | None = None,
) -> ShardingReport:
    """Return the placement of each leaf of a tree on a mesh; move nothing.

    Args:
        tree: tree of arrays or ShapeDtypeStructs.
        mesh: the mesh.
        rules: partition rules; None to use the leaves' axis names.
        axis_rules: mesh axes of each logical axis name; None for `DEFAULT_AXIS_RULES`.
        units: number of indivisible units of a logical axis, such as {"heads": 9}: its mesh axes
            must divide this number, not only the size of the dimension.
    """
    compiled = None
    if rules is not None:
        compiled = [
            _Rule(re.compile(text), tuple(spec), _is_catch_all(text)) for text, spec in rules
        ]
    axis_rules = DEFAULT_AXIS_RULES if axis_rules is None else axis_rules
    leaves = tuple(
        _place(named, mesh, compiled, axis_rules, units or {}) for named in named_leaves(tree)
    )
    met = {leaf.rule for leaf in leaves}
    idle = tuple(text for text, _ in rules or () if text not in met and not _is_catch_all(text))
    return ShardingReport(mesh, leaves, idle)


def _place(
    named: NamedLeaf,
    mesh: Mesh | AbstractMesh,
    rules: Sequence[_Rule] | None,
    axis_rules: AxisRules,
    units: Mapping[str, int],
) -> LeafPlacement:
    shape = tuple(getattr(named.leaf, "shape", ()))
    path = named.readable_path
    placed = resolve_spec(
        shape,
        mesh.shape,
        match=None if rules is None else _match(path, rules),
        axes=named.axes,
        axis_rules=axis_rules,
        units=units,
    )
    nbytes = leaf_bytes(named.leaf)
    shards = prod(shard_count(entry_axes(entry), mesh.shape) for entry in placed.entries)
    return LeafPlacement(
        path=path,
        shape=shape,
        dtype=str(getattr(named.leaf, "dtype", type(named.leaf).__name__)),
        rule=placed.rule,
        spec=PartitionSpec(*placed.entries),
        nbytes=nbytes,
        bytes_per_device=nbytes // shards,
        problems=tuple(problem.text for problem in placed.problems),
        unmatched=placed.unmatched,
    )


def _match(path: str, rules: Iterable[_Rule]) -> RuleMatch:
    for pattern, entries, catch_all in rules:
        if pattern.search(path):
            return RuleMatch(pattern.pattern, entries, catch_all)
    return RuleMatch(None)


def _is_catch_all(pattern: str) -> bool:
    """Return whether a rule's pattern matches any path."""
    return re.search(pattern, "") is not None


def module_plan(
    tree: Any,
    config: Any,
    partition_rules: Any = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> ShardingReport:
    """Return the placement of each leaf of a model's state; move nothing.

    Args:
        tree: the state; may be abstract.
        config: the model's configuration, or None.
        partition_rules: partition rules; None for the config's. If it has none either, the leaves'
            axis names decide, with the mesh axes of the config's `partition_axis`.
        mesh: the mesh; None for that of the leaves, else the config's.

    Raises:
        ArgumentError: if the rules are invalid, if there is no mesh, or `mesh` is none.
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


def check_rules(rules: Any) -> PartitionRules | None:
    """Return partition rules as a tuple, after a check; None for None.

    Raises:
        ArgumentError: a rule is no pair of a regular expression and a PartitionSpec.
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
