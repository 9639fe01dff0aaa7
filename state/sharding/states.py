"""Sharding of a training state, as a mixin of EasyDeLState."""

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from cairn.counts import count_text
from cairn.interop.errors import ArgumentError
from cairn.state.errors import NotInitializedError, TreeStructureError
from cairn.state.paths import named_leaves, own_variables
from cairn.state.sharding.gather import gather_tree
from cairn.state.sharding.mesh import home_of, sharding_of
from cairn.state.sharding.optimizers import explain_optimizer, optimizer_shardings
from cairn.state.sharding.put import put_leaf, put_tree
from cairn.state.sharding.report import ShardingReport
from cairn.state.sharding.rules import module_plan
from cairn.state.sharding.stable_placement import placement_of, settled

__all__ = ["StateShardingMixin", "beside", "params_by_rules", "place_step"]

_MISSING = object()
_LAST_STEP = int(np.iinfo(np.int32).max)


class StateShardingMixin:
    """Sharding methods of a state; every method returns a new state."""

    if TYPE_CHECKING:
        graphstate: Any
        graphother: Any
        opt_state: Any
        step: Any

        placement: Any

        @property
        def added_fields(self) -> dict[str, Any]:
            """Values of the fields that a subclass adds to the state, by name."""
            ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Flax defines `replace` in every subclass, which would hide the one of this class.
        cls.replace = StateShardingMixin._replaced  # type: ignore[method-assign]

    def replace(self, **updates: Any) -> Self:
        """Return a copy with other values of these fields.

        The copy records the shardings of its leaves. Under `jax.jit`, its new leaves get the
        shardings of this state's leaves, so that a training step compiles only once.
        """
        return self._replaced(**updates)

    def _replaced(self, **updates: Any) -> Self:
        """Return a copy with other values; see `replace`."""
        whole: Any = self
        for name in updates.keys() & {"graphstate", "graphother", *whole.added_fields}:
            updates[name] = own_variables(updates[name])
        if isinstance(updates.get("step"), bool | int | float | np.number):
            home = home_of((whole.graphstate, whole.graphother))
            updates["step"] = place_step(updates["step"], home)
        if "tx_init" not in updates and updates.get("tx", whole.tx) is not whole.tx:
            updates["tx_init"] = None  # it describes the old optimizer
        state: Self = dataclasses.replace(whole, **updates)
        moved = updates.keys() & {"graphstate", "graphother", "opt_state", *whole.added_fields}
        return settled(state) if moved and "placement" not in updates else state

    def shard_model(self, partition_rules: Any = None, mesh: Mesh | None = None) -> Self:
        """Return the state with the model's leaves sharded by the rules.

        Args:
            partition_rules: pairs of a regular expression and a PartitionSpec; None for the
                config's rules, else those that follow from the axis names of the parameters.
            mesh: the mesh; None for the one that the leaves are on, else the config's.

        Raises:
            ShardingError: if the mesh does not divide some leaves; lists all of them.
        """
        params, other = _model_plans(self, partition_rules, mesh)
        ShardingReport(params.mesh, params.leaves + other.leaves).raise_for_problems()
        return self.replace(
            step=place_step(self.step, NamedSharding(params.mesh, PartitionSpec())),
            graphstate=put_tree(self.graphstate, params.shardings(self.graphstate)),
            graphother=put_tree(self.graphother, other.shardings(self.graphother)),
        )

    def gather_model(self, partition_rules: Any = None, mesh: Mesh | None = None) -> Self:
        """Return the state with the model's leaves in host memory, gathered one by one.

        The arguments are ignored: a gather needs only the arrays' own shardings.
        """
        return self.replace(
            graphstate=gather_tree(self.graphstate), graphother=gather_tree(self.graphother)
        )

    def shard_optimizer_state(self, opt_state: Any = None, partition_rules: Any = None) -> Self:
        """Return the state with optimizer leaves sharded like the parameters that they mirror.

        Args:
            opt_state: the optimizer state; None for the state's own.
            partition_rules: rules for the parameters; None for the parameters' present shardings.

        Raises:
            NotInitializedError: if there is no optimizer state; it is a ValueError.
            ShardingError: if the mesh does not divide some parameters by these rules.
        """
        opt_state = self.opt_state if opt_state is None else opt_state
        if opt_state is None:
            raise NotInitializedError(
                path="shard_optimizer_state", expected="an optimizer state", found="opt_state=None"
            )
        params = params_by_rules(self, partition_rules)
        return self.replace(opt_state=put_tree(opt_state, optimizer_shardings(opt_state, params)))

    def gather_optimizer_state(self, partition_rules: Any = None) -> Self:
        """Return the state with the optimizer's leaves in host memory, gathered one by one.

        Raises:
            NotInitializedError: if there is no optimizer state; it is an AssertionError.
        """
        if self.opt_state is None:
            raise NotInitializedError(
                path="gather_optimizer_state", expected="an optimizer state", found="opt_state=None"
            )
        return self.replace(opt_state=gather_tree(self.opt_state))

    def shard_state(self, partition_rules: Any = None, mesh: Mesh | None = None) -> Self:
        """Return the state with model and optimizer (if there is one) sharded by the rules.

        Fields that a subclass adds are sharded like the optimizer's leaves: each leaf like the
        parameter whose path its own contains.

        Raises:
            ShardingError: if the mesh does not divide some leaves; lists all of them.
        """
        state = self.shard_model(partition_rules, mesh)
        state = state.replace(**beside(self.added_fields, state.graphstate))
        return state if state.opt_state is None else state.shard_optimizer_state()

    def gather_state(self) -> Self:
        """Return the state in host memory: model, optimizer (if there is one), added fields."""
        state = self.gather_model().replace(**gather_tree(self.added_fields))
        return state if state.opt_state is None else state.gather_optimizer_state()

    def shard_with_shape(self, shape: Any) -> Self:
        """Return the state sharded like another tree of the same structure.

        Args:
            shape: tree of shardings (such as `shardings` of a state), or of arrays or
                ShapeDtypeStructs with shardings. A leaf for which it has None is not moved.
                Works under jit, too.

        Raises:
            TreeStructureError: if the trees differ.
        """
        leaves, structure = jax.tree.flatten(self)
        shardings = _places_of(shape, self)
        placed = []
        for leaf, place in zip(leaves, shardings, strict=True):
            if place is None:
                placed.append(leaf)
            elif isinstance(leaf, jax.core.Tracer):
                placed.append(jax.lax.with_sharding_constraint(leaf, place))
            else:
                placed.append(put_leaf(leaf, place))
        restored: Self = jax.tree.unflatten(structure, placed)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            abstract = [
                leaf
                if place is None
                else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
                for leaf, place in zip(leaves, shardings, strict=True)
            ]
            placement = placement_of(jax.tree.unflatten(structure, abstract))
            whole: Any = restored
            noted: Self = dataclasses.replace(whole, placement=placement)
            return noted
        return settled(restored)

    @property
    def shardings(self) -> Self:
        """State with the sharding of each leaf in its place; None for leaves that have none."""
        placed: Self = jax.tree.map(sharding_of, self)
        return placed

    def explain_sharding(
        self, partition_rules: Any = None, mesh: Mesh | None = None, *, strict: bool = False
    ) -> ShardingReport:
        """Return a report of each leaf's rule, spec, bytes per device and problems; move nothing.

        Raises:
            ShardingError: if `strict` is True, and the mesh does not divide some leaves or no rule
                covers large ones; lists all of them.
        """
        params, other = _model_plans(self, partition_rules, mesh)
        leaves = params.leaves + other.leaves
        if self.opt_state is not None:
            leaves += explain_optimizer(
                self.opt_state, _abstract(self.graphstate, params), params.mesh
            )
        idle = tuple(rule for rule in params.idle_rules if rule in other.idle_rules)
        report = ShardingReport(params.mesh, leaves, idle)
        return report.raise_for_problems(strict=True) if strict else report


def place_step(step: Any, home: Sharding | None) -> Any:
    """Return a step number as an int32 scalar array with a sharding.

    With the sharding of the state's other small leaves, a jitted training step compiles only once.

    Args:
        step: an integer, or an integer scalar array; abstract and traced ones are returned as is.
        home: the sharding, from `home_of`; None for JAX's default device.

    Raises:
        ArgumentError: if the step is no integer, is below 0, or does not fit into int32.
    """
    dtype = getattr(step, "dtype", None)
    dtype = np.asarray(step).dtype if dtype is None else dtype
    if not jnp.issubdtype(dtype, jnp.integer) or np.ndim(step) != 0:
        raise ArgumentError(
            path="step",
            expected="a whole number of steps: an integer, or an integer scalar array",
            found=repr(step),
        )
    if isinstance(step, int | np.integer | np.ndarray) and not 0 <= int(step) <= _LAST_STEP:
        raise ArgumentError(
            path="step",
            expected=f"a whole number of steps: an integer, 0 or more, at most {_LAST_STEP}",
            found=step,
        )
    if isinstance(step, jax.ShapeDtypeStruct | jax.core.Tracer):
        return step
    array = jnp.asarray(step, dtype=jnp.int32)
    return array if home is None else put_leaf(array, home)


def beside(fields: dict[str, Any], params: Any) -> dict[str, Any]:
    """Return added fields with JAX arrays sharded like the parameters; other values unchanged."""
    structure: Any = jax.tree.structure(fields)
    leaves, places = (
        jax.tree.leaves(fields),
        structure.flatten_up_to(optimizer_shardings(fields, params)),
    )
    put = [
        leaf if place is None or not isinstance(leaf, jax.Array) else put_leaf(leaf, place)
        for leaf, place in zip(leaves, places, strict=True)
    ]
    placed: dict[str, Any] = jax.tree.unflatten(structure, put)
    return placed


def params_by_rules(state: Any, partition_rules: Any) -> Any:
    """Return a state's parameters, abstract, with shardings by rules; for None, as they are.

    Raises:
        ShardingError: if the mesh does not divide some parameters.
    """
    if partition_rules is None:
        return state.graphstate
    config = state.module_config
    report = module_plan(state.graphstate, config, partition_rules).raise_for_problems()
    return _abstract(state.graphstate, report)


def _model_plans(
    state: Any, partition_rules: Any, mesh: Mesh | None
) -> tuple[ShardingReport, ShardingReport]:
    """Return the placements of a state's parameters and of its other variables."""
    config = state.module_config
    params = module_plan(state.graphstate, config, partition_rules, mesh)
    return params, module_plan(state.graphother, config, partition_rules, params.mesh)


def _abstract(tree: Any, report: ShardingReport) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        tree,
        report.shardings(tree),
    )


def _places_of(shape: Any, state: Any) -> list[Sharding | None]:
    """Return the shardings that a tree has for the leaves of a state, in the order of the leaves.

    Raises:
        TreeStructureError: if the trees differ in a leaf's path or shape; lists every one.
    """
    structure: Any = jax.tree.structure(state)
    own = named_leaves(state)
    problems = []
    try:
        places = structure.flatten_up_to(shape)
    except ValueError:
        # Only static parts may differ, such as the optimizer object: compare by paths.
        by_path = {named.path: named.leaf for named in named_leaves(shape)}
        places = [by_path.pop(named.path, _MISSING) for named in own]
        problems = [f"{path}: unexpected" for path in by_path]
    for named, place in zip(own, places, strict=True):
        if place is _MISSING:
            problems.append(f"{named.path}: missing")
        elif (
            place is not None
            and not isinstance(place, Sharding)
            and np.shape(place) != np.shape(named.leaf)
        ):
            problems.append(
                f"{named.path}: expected shape {np.shape(named.leaf)}, found {np.shape(place)}"
            )
    if problems:
        raise TreeStructureError(
            count_text(len(problems), "leaf does not fit", "leaves do not fit"),
            path="shard_with_shape",
            expected=f"a placement for each of the state's {count_text(len(own), 'leaf')}",
            next_step="take `shardings` of a state with the same model and optimizer",
            problems=sorted(problems),
        )
    return [
        place if place is None or isinstance(place, Sharding) else getattr(place, "sharding", None)
        for place in places
    ]
