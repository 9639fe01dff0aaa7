"""Stable placement of a state's leaves while a training step is compiled.

Under `jax.jit` the compiler chooses the shardings of results: it may return a replicated bias
sharded, and then the next call compiles again. So a state that is made under jit constrains its
leaves: to the shardings of the plan (partition rules, axis names), or, if the state's leaves had
others before, to those. The optimizer's leaves follow their parameters in the same way.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from cairn.interop.partition_axis import entry_axes
from cairn.interop.placement.specs import splitting_axes
from cairn.state.sharding.mesh import compiling_mesh, mesh_of
from cairn.state.sharding.optimizers import optimizer_shardings
from cairn.state.sharding.rules import module_plan
from cairn.state.sharding.specs import short_spec

__all__ = ["Placement", "at_home", "placement_of", "settled"]

State = TypeVar("State")


@dataclass(frozen=True)
class Placement:
    """Specs of a state's leaves, for those parts of the state that differ from the plan.

    Attributes:
        model: specs of the leaves of `graphstate` and `graphother`, in order; None if they are as
            planned.
        optimizer: specs of the leaves of `opt_state`, in order; None if each follows its
            parameter.
        fields: specs of the leaves of fields that a subclass adds, in order, with None for a leaf
            that is not on the mesh; None if each follows its parameter.
    """

    model: tuple[PartitionSpec, ...] | None = None
    optimizer: tuple[PartitionSpec, ...] | None = None
    fields: tuple[PartitionSpec | None, ...] | None = None


def settled(state: State) -> State:
    """Return the state with its leaves' placement recorded or, under jit, constrained.

    Outside of jit, `placement_of` is recorded in `placement`. Under jit, the leaves are constrained
    to the recorded specs, or to the plan where none are recorded. The state is returned unchanged
    if its parts do not fit each other, or, outside of jit, if a leaf of its model is not on a mesh
    or the placement is recorded already.
    """
    whole: Any = state
    model = (whole.graphstate, whole.graphother)
    try:
        whole.module_config  # noqa: B018  (merges the parts, once)
    except ValueError:
        return state  # its parts do not fit each other: the code that merges them raises the error
    mesh = compiling_mesh(model)
    if mesh is not None:
        return _kept(whole, mesh)  # type: ignore[no-any-return]
    if _specs(jax.tree.leaves(model), mesh_of(model)) is None:
        return state
    placement = placement_of(whole)
    if placement == whole.placement:
        return state
    noted: State = dataclasses.replace(whole, placement=placement)
    return noted


def at_home(tree: Any, home: Sharding | None) -> Any:
    """Return the tree with its uncommitted and NumPy leaves moved to a sharding.

    For example, a module's random key is uncommitted: it would be committed after a training step,
    so that the next step would compile again.

    Args:
        tree: the tree.
        home: the sharding, from `home_of`; None returns the tree unchanged.
    """
    if home is None:
        return tree

    def put(leaf: Any) -> Any:
        free = isinstance(leaf, np.ndarray) or (
            isinstance(leaf, jax.Array)
            and not isinstance(leaf, jax.core.Tracer)
            and not leaf.committed
        )
        return jax.device_put(leaf, home) if free else leaf

    return jax.tree.map(put, tree)


def placement_of(state: Any) -> Placement | None:
    """Return the specs of a state's leaves that differ from the plan; None if none do.

    Also None if a leaf of the model is not on a mesh.
    """
    model = (state.graphstate, state.graphother)
    mesh = mesh_of(model)
    specs = _specs(jax.tree.leaves(model), mesh)
    if specs is None or mesh is None:
        return None
    placed = specs if specs != _planned(state, mesh) else None
    optimizer = _specs(jax.tree.leaves(state.opt_state), mesh)
    if optimizer is not None:
        mirrored = optimizer_shardings(state.opt_state, _with_specs(state.graphstate, specs, mesh))
        if optimizer == _specs(_as_leaves(mirrored), mesh):
            optimizer = None
    params = _with_specs(state.graphstate, specs, mesh)
    mirrored = jax.tree.leaves(optimizer_shardings(state.added_fields, params))
    own = jax.tree.leaves(state.added_fields)
    fields = tuple(_spec(leaf, mesh) for leaf in own)
    unlike = any(
        spec not in (None, _spec(place, mesh)) for spec, place in zip(fields, mirrored, strict=True)
    )
    if placed is optimizer is None and not unlike:
        return None
    return Placement(placed, optimizer, fields if unlike else None)


def _kept(state: Any, mesh: AbstractMesh) -> Any:
    placement: Placement = state.placement or Placement()
    leaves, structure = jax.tree.flatten((state.graphstate, state.graphother))
    specs: Sequence[PartitionSpec] | None = placement.model
    if specs is None or len(specs) != len(leaves):
        specs = _planned(state, mesh)
    kept = [_constrained(leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]
    graphstate, graphother = jax.tree.unflatten(structure, kept)
    updates = {"graphstate": graphstate, "graphother": graphother}
    if state.opt_state is not None:
        moments, structure = jax.tree.flatten(state.opt_state)
        moment_specs: Sequence[PartitionSpec] | None = placement.optimizer
        if moment_specs is None or len(moment_specs) != len(moments):
            params = _with_specs(state.graphstate, specs, mesh)
            places = _as_leaves(optimizer_shardings(state.opt_state, params))
            moment_specs = [place.spec for place in places]
        kept = [
            _constrained(leaf, spec, mesh) for leaf, spec in zip(moments, moment_specs, strict=True)
        ]
        updates["opt_state"] = jax.tree.unflatten(structure, kept)
    added, structure = jax.tree.flatten(state.added_fields)
    if added:
        params = _with_specs(state.graphstate, specs, mesh)
        planned = [
            place.spec for place in _as_leaves(optimizer_shardings(state.added_fields, params))
        ]
        noted = placement.fields
        if noted is None or len(noted) != len(added):
            noted = (None,) * len(added)
        kept = [
            _constrained(leaf, plan if spec is None else spec, mesh)
            for leaf, spec, plan in zip(added, noted, planned, strict=True)
        ]
        updates |= jax.tree.unflatten(structure, kept)
    return dataclasses.replace(state, **updates)


def _planned(state: Any, mesh: Mesh | AbstractMesh) -> tuple[PartitionSpec, ...]:
    config = state.module_config
    reports = [
        module_plan(part, config, mesh=mesh) for part in (state.graphstate, state.graphother)
    ]
    return tuple(leaf.spec for report in reports for leaf in report.leaves)


def _constrained(leaf: Any, spec: PartitionSpec, mesh: AbstractMesh) -> Any:
    if not isinstance(leaf, jax.core.Tracer) or not leaf.ndim or not _fits(leaf.shape, spec, mesh):
        return leaf
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))


def _fits(shape: tuple[int, ...], spec: PartitionSpec, mesh: AbstractMesh) -> bool:
    """Return whether a leaf of this shape can have a spec, which may come from another mesh."""
    entries = [entry_axes(entry) for entry in spec]
    if len(entries) > len(shape) or any(
        axis not in mesh.shape for names in entries for axis in names
    ):
        return False
    parts = [prod(mesh.shape[axis] for axis in names) for names in entries]
    return all(size % part == 0 for size, part in zip(shape, parts, strict=False))


def _specs(leaves: Sequence[Any], mesh: Mesh | None) -> tuple[PartitionSpec, ...] | None:
    """Return the specs of leaves; None if one of the leaves is not on the mesh."""
    specs = []
    for leaf in leaves:
        spec = _spec(leaf, mesh)
        if spec is None:
            return None
        specs.append(spec)
    return tuple(specs)


def _spec(leaf: Any, mesh: Mesh | None) -> PartitionSpec | None:
    """Return the spec of a leaf or of a sharding; None if it is not on the mesh."""
    place = leaf if isinstance(leaf, NamedSharding) else None
    if place is None and not isinstance(leaf, jax.core.Tracer):
        place = getattr(leaf, "sharding", None)
    if mesh is None or not isinstance(place, NamedSharding) or place.mesh != mesh:
        return None
    return short_spec(splitting_axes(entry, mesh.shape) for entry in place.spec)


def _with_specs(tree: Any, specs: Sequence[PartitionSpec], mesh: Mesh | AbstractMesh) -> Any:
    """Return the tree with abstract leaves whose shardings have these specs.

    Specs beyond the number of leaves are ignored.
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure,
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
            for leaf, spec in zip(leaves, specs, strict=False)
        ],
    )


def _as_leaves(shardings: Any) -> list[Any]:
    return jax.tree.leaves(shardings)
