"""Sharding of a module over a mesh, as a mixin of EasyDeLBaseModule."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cairn.state.paths import named_leaves
from cairn.state.sharding.gather import gather_leaf, gather_tree
from cairn.state.sharding.mesh import mesh_of
from cairn.state.sharding.put import put_leaf, put_tree
from cairn.state.sharding.report import ShardingReport
from cairn.state.sharding.rules import PartitionRules, check_rules, module_plan

__all__ = ["ModuleShardingMixin"]


class ModuleShardingMixin:
    """Sharding methods of a module; they change it in place and return it."""

    def shard_model(self, partition_rules: Any = None, mesh: Mesh | None = None) -> Self:
        """Shard every leaf over the mesh by partition rules.

        Args:
            partition_rules: pairs of a regular expression and a PartitionSpec; None for the
                config's rules, else those that follow from the axis names of the parameters.
            mesh: the mesh; None for the one that the module is on, else the config's.

        Raises:
            ShardingError: if the mesh does not divide some leaves; lists all of them and moves
                none.
        """
        tree = nnx.state(self)
        report = self._plan(tree, partition_rules, mesh).raise_for_problems()
        nnx.update(self, put_tree(tree, report.shardings(tree)))
        return self

    def gather_model(self, partition_rules: Any = None, mesh: Mesh | None = None) -> Self:
        """Gather every leaf into host memory, one by one.

        The arguments are ignored: a gather needs only the arrays' own shardings.
        """
        nnx.update(self, gather_tree(nnx.state(self)))
        return self

    def fully_shard(self, mesh: Mesh | None = None) -> Self:
        """Shard every leaf over all devices, along the longest dimension that they divide.

        Leaves without such a dimension are replicated.
        """
        tree = nnx.state(self)
        mesh = mesh or mesh_of(tree) or self._config().mesh
        # Axes of size 1 divide nothing, and the specs of compiled results omit them.
        splitting = tuple(name for name, size in mesh.shape.items() if size > 1)
        axes = splitting[0] if len(splitting) == 1 else splitting or None

        def place(leaf: Any) -> NamedSharding:
            shape = getattr(leaf, "shape", ())
            fitting = [index for index, size in enumerate(shape) if size % mesh.size == 0]
            if not fitting or axes is None:
                return NamedSharding(mesh, PartitionSpec())
            longest = max(fitting, key=lambda index: shape[index])
            return NamedSharding(mesh, PartitionSpec(*[None] * longest, axes))

        nnx.update(self, put_tree(tree, jax.tree.map(place, tree)))
        return self

    def fully_gather(self, mesh: Mesh | None = None) -> Self:
        """Gather every leaf into host memory; alias of `gather_model`."""
        return self.gather_model(mesh=mesh)

    def explain_sharding(
        self, partition_rules: Any = None, mesh: Mesh | None = None, *, strict: bool = False
    ) -> ShardingReport:
        """Return a report of each leaf's rule, spec, bytes per device and problems; move nothing.

        Raises:
            ShardingError: if `strict` is True, and the mesh does not divide some leaves or no rule
                covers large ones; lists all of them.
        """
        report = self._plan(nnx.state(self), partition_rules, mesh)
        return report.raise_for_problems(strict=True) if strict else report

    def _get_partition_rules(self, partition_rules: Any = None) -> PartitionRules | None:
        """Return the argument, else the config's rules; None means that axis names decide."""
        rules = check_rules(partition_rules)
        return rules if rules is not None else check_rules(self._config().get_partition_rules())

    def _specs_sharding(self, partition_rules: Any = None, mesh: Mesh | None = None) -> Any:
        """Return the module's state with a PartitionSpec in place of each leaf."""
        named = self._named_shardings(partition_rules, mesh)
        return jax.tree.map(lambda place: place.spec, named)

    def _named_shardings(self, partition_rules: Any = None, mesh: Mesh | None = None) -> Any:
        """Return the module's state with a NamedSharding in place of each leaf."""
        tree = nnx.state(self)
        return self._plan(tree, partition_rules, mesh).raise_for_problems().shardings(tree)

    def _shard_fns(
        self, partition_rules: Any = None, mesh: Mesh | None = None
    ) -> dict[str, Callable[[Any], Any]]:
        """Return, by path, functions that each shard a leaf by the rules."""
        named = named_leaves(self._named_shardings(partition_rules, mesh))
        return {leaf.path: partial(put_leaf, place=leaf.leaf) for leaf in named}

    def _gather_fns(
        self, partition_rules: Any = None, mesh: Mesh | None = None
    ) -> dict[str, Callable[[Any], Any]]:
        """Return, by path, functions that each gather a leaf into host memory."""
        return {leaf.path: gather_leaf for leaf in named_leaves(nnx.state(self))}

    def _apply_sharding_fns(
        self,
        tree: Any,
        partition_rules: Any = None,
        mesh: Mesh | None = None,
        is_gather: bool = False,
    ) -> Any:
        """Shard (or gather) a tree of this module's leaves, and return it."""
        if is_gather:
            return gather_tree(tree)
        report = self._plan(tree, partition_rules, mesh).raise_for_problems()
        return put_tree(tree, report.shardings(tree))

    def _plan(self, tree: Any, partition_rules: Any, mesh: Mesh | None) -> ShardingReport:
        return module_plan(tree, self._config(), partition_rules, mesh)

    def _config(self) -> Any:
        return self.config  # type: ignore[attr-defined]  # the module's
