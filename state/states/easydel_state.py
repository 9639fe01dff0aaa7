"""EasyDeLState: parameters, optimizer state and step of a model in training, as one pytree."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import jax
import numpy as np
import optax
from flax import nnx, struct

from cairn.interop.config.frozen import FrozenJSON
from cairn.interop.errors import ArgumentError
from cairn.state.errors import NotInitializedError, require_optimizer
from cairn.state.paths import own_variables, rebuild
from cairn.state.sharding.mesh import home_of
from cairn.state.sharding.report import leaf_bytes
from cairn.state.sharding.stable_placement import Placement, at_home, settled
from cairn.state.sharding.states import StateShardingMixin, params_by_rules, place_step
from cairn.state.states.added_fields import added_fields, added_names, check_added
from cairn.state.states.optimizer_step import take_step
from cairn.state.states.optimizers import init_optimizer
from cairn.state.states.rng_reuse import RngReuse, drawn_streams, random_streams, warn_of_reuse
from cairn.state.states.state_storage import StateStorageMixin
from cairn.state.states.state_table import state_table
from cairn.storage.notebooks import never_raises

__all__ = ["EasyDeLState"]

_NO_REUSE: Final = RngReuse()


class EasyDeLState(StateShardingMixin, StateStorageMixin, struct.PyTreeNode, eq=False):
    """Model, optimizer state and step number at one point of training.

    It is a pytree with the leaves of `step`, `graphstate`, `graphother` and `opt_state`; the other
    fields are static and hashable. Methods return new objects. A jitted training step compiles
    once, keeps the shardings of leaves, and may be donated the state that it replaces:

        step = jax.jit(train_step, donate_argnums=0)
        state, loss = step(state, batch)

    A subclass adds fields:

        class MyState(EasyDeLState):
            ema: Any = None

        state = MyState.create(model=model, ema=jax.tree.map(jnp.copy, model.graphstate))

    Such fields are part of the pytree, are not changed by `apply_gradients`, and are saved and
    restored. Their values are arrays, PRNG keys, Python numbers, nested containers of these, or
    None. For containers that JSON can't describe, such as Optax's, `load_state` needs `fields=`. A
    field made with `flax.struct.field(pytree_node=False)` is static: it must be hashable, and is
    not saved; a load sets it to its default, or to the value in `fields=`.

    Attributes:
        step: number of optimizer steps taken, an int32 scalar.
        graphdef: static structure of the model.
        graphstate: the trained parameters.
        graphother: the model's other variables: batch statistics, random keys, frozen weights.
        tx: the optimizer; None without.
        opt_state: the optimizer's state; None without.
        apply_fn: a function that applies the model, for your own use.
        hyperparameters: JSON that is saved with the state.
        tx_init: JSON that rebuilds `tx`; see `cairn.state.states.optimizers.make_optimizer`.
        placement: shardings of leaves that differ from those of rules and axis names; set
            automatically.
        rng_reuse: random streams that a step used without storing their new counters; set
            automatically.
    """

    step: Any
    graphdef: Any = struct.field(pytree_node=False)
    graphstate: Any
    graphother: Any
    tx: optax.GradientTransformation | None = struct.field(pytree_node=False, default=None)
    opt_state: Any = None
    apply_fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)
    hyperparameters: Mapping[str, Any] = struct.field(pytree_node=False, default_factory=FrozenJSON)
    tx_init: Mapping[str, Any] | None = struct.field(pytree_node=False, default=None)
    placement: Placement | None = struct.field(pytree_node=False, default=None)
    rng_reuse: RngReuse = struct.field(pytree_node=False, default=_NO_REUSE)

    def __post_init__(self) -> None:
        if self.rng_reuse.paths:
            if isinstance(self.step, jax.core.Tracer):
                # The record is about another `graphother`.
                if self.rng_reuse.graphother_id != id(self.graphother):
                    object.__setattr__(self, "rng_reuse", _NO_REUSE)
            elif isinstance(self.step, jax.Array):
                self.rng_reuse.check(self)
        for name in ("hyperparameters", "tx_init"):
            value = getattr(self, name)
            if isinstance(value, Mapping) and not isinstance(value, FrozenJSON):
                object.__setattr__(self, name, FrozenJSON(value, name=name))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Comparing arrays gives arrays, not a bool, so states have no equality.
        super().__init_subclass__(**{"eq": False, "kw_only": True, **kwargs})

    @never_raises
    def _repr_html_(self) -> str:
        model = getattr(self.graphdef, "type", None)
        return state_table(
            type(self).__name__,
            {
                "graphstate": self.graphstate,
                "graphother": self.graphother,
                "opt_state": self.opt_state,
                **self.added_fields,
            },
            [
                ("model", getattr(model, "__name__", None)),
                ("optimizer", None if self.tx_init is None else self.tx_init.get("name")),
            ],
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Static parts are immutable; with copies of them, each step would compile again.
        copied: Self = jax.tree.map(lambda leaf: copy.deepcopy(leaf, memo), self)
        return copied

    @classmethod
    def create(
        cls,
        *,
        step: int | jax.Array | None = None,
        graphdef: Any = None,
        graphstate: Any = None,
        graphother: Any = None,
        model: Any = None,
        tx: optax.GradientTransformation | None = None,
        opt_state: Any = None,
        init_opt_state: bool = False,
        apply_fn: Callable[..., Any] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        tx_init: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Self:
        """Make a state from a model, or from its parts.

        Args:
            step: number of steps taken so far; None for 0.
            graphdef: static structure of the model; needs `graphstate` and `graphother`.
            graphstate: the trained parameters.
            graphother: the model's other variables.
            model: the module, instead of these three.
            tx: the optimizer.
            opt_state: the optimizer's state.
            init_opt_state: whether to make a new optimizer state, sharded like the parameters.
            apply_fn: a function that applies the model, for your own use.
            hyperparameters: JSON to save with the state.
            tx_init: JSON that rebuilds `tx`.
            **fields: values of the fields that a subclass adds.

        Raises:
            ArgumentError: if a field is unknown or missing.
            ValueError: if both a model and parts of one are given, if some parts are missing, if
                `init_opt_state` is given with an `opt_state` or without a `tx`, or if `step` is no
                integer.
        """
        cls.check_fields(fields, path="create")
        parts = {"graphdef": graphdef, "graphstate": graphstate, "graphother": graphother}
        passed = [name for name, part in parts.items() if part is not None]
        if model is not None and passed:
            raise ArgumentError(
                path="create",
                expected="either model or graphdef, graphstate and graphother",
                found=f"model and {', '.join(passed)}",
            )
        if model is None and len(passed) < len(parts):
            raise ArgumentError(
                path="create",
                expected="a model, or all of graphdef, graphstate and graphother",
                found=f"only {', '.join(passed) or 'none of them'}",
            )
        if init_opt_state and opt_state is not None:
            raise ArgumentError(
                path="create", expected="opt_state or init_opt_state=True", found="both"
            )
        if init_opt_state and tx is None:
            raise ArgumentError(path="create", expected="tx with init_opt_state=True", found="None")
        if model is not None:
            trainable = getattr(model, "trainable_filter", nnx.Param)
            graphdef, graphstate, graphother = nnx.split(model, trainable, ...)
        graphstate, graphother = own_variables((graphstate, graphother))
        home = home_of((graphstate, graphother))
        fields = jax.tree.map(
            lambda leaf: at_home(leaf, home) if isinstance(leaf, jax.Array) else leaf, fields
        )
        state = cls(
            step=place_step(0 if step is None else step, home),
            graphdef=graphdef,
            graphstate=graphstate,
            graphother=at_home(graphother, home),
            tx=tx,
            # Optax makes counters on the first device; a step would move them and compile again.
            opt_state=jax.tree.map(
                lambda leaf: leaf if np.ndim(leaf) else at_home(leaf, home), opt_state
            ),
            apply_fn=apply_fn,
            hyperparameters=FrozenJSON(hyperparameters, name="hyperparameters"),
            tx_init=None if tx_init is None else FrozenJSON(tx_init, name="tx_init"),
            **fields,
        )
        state = settled(state)
        return state.init_opt_state() if init_opt_state else state

    # -- the model -----------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The model of this state. It is merged once and cached; changing it changes no state."""
        if "_model" not in self.__dict__:
            object.__setattr__(self, "_model", self.merge(self.graphstate))
        return self.__dict__["_model"]

    @property
    def module(self) -> Any:
        """Older name of `model`."""
        return self.model

    @property
    def module_config(self) -> Any:
        """The model's configuration, or None if the module has none."""
        return getattr(self.model, "config", None)

    @property
    def module_config_args(self) -> dict[str, Any]:
        """The model's configuration as a dict for JSON; {} if the module has none."""
        return {} if self.module_config is None else dict(self.module_config.to_dict())

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as a nested dict of arrays."""
        pure: dict[str, Any] = nnx.to_pure_dict(self.graphstate)
        return pure

    @property
    def extras(self) -> dict[str, Any]:
        """JSON that was passed to `save_state(extras=...)`, on a loaded state; {} on any other.

        States that are made from the loaded one do not have it.
        """
        extras: dict[str, Any] = self.__dict__.get("_extras", {})
        return extras

    @classmethod
    def added_field_names(cls, *, static: bool = False) -> list[str]:
        """Return the names of fields that a subclass adds: static ones, or those of the tree."""
        return added_names(cls, EasyDeLState, static=static)

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any], *, path: str) -> None:
        """Check the values of added fields with which a state is made.

        Args:
            fields: the values, by name of the field.
            path: name of the method that makes the state, for the error.

        Raises:
            ArgumentError: if a field is unknown, or fields without default have no value; names
                all.
        """
        check_added(cls, EasyDeLState, fields, path=path)

    @property
    def added_fields(self) -> dict[str, Any]:
        """Values of the fields that a subclass adds to the tree, by name."""
        return added_fields(self, EasyDeLState)

    def merge(self, tree: Any) -> Any:
        """Return the model with the parameters of `tree`, an NNX State or a nested dict.

        A call of the model changes its variables, such as a dropout's counter, but not this state.
        A training step must store them as the new state's `graphother`; otherwise the next step
        uses the same random numbers, and a warning says so.

        Raises:
            TreeStructureError: if paths or shapes of `tree` are not those of `graphstate`; lists
                all differences.
        """
        tree = rebuild(self.graphstate, tree, path="parameters")
        # Without the copy, a call of the model would change variables of this state.
        model = nnx.merge(self.graphdef, tree, self.graphother, copy=True)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
            warn_of_reuse(self.__dict__.get("_drawn", ()))
            self.__dict__.setdefault("_streams", []).extend(random_streams(model))
        return model

    def merge_to_state(self, tree: Any) -> Self:
        """Return the state with other parameters, an NNX State or a nested dict.

        Raises:
            TreeStructureError: if paths or shapes of `tree` are not those of `graphstate`; lists
                all differences.
        """
        return self.replace(graphstate=rebuild(self.graphstate, tree, path="parameters"))

    @property
    def size(self) -> int:
        """Bytes of `graphstate` and `opt_state`; copies on several devices count once."""
        return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves((self.graphstate, self.opt_state)))

    # -- training ------------------------------------------------------------------------------

    def apply_gradients(self, *, grads: Any, **extra: Any) -> Self:
        """Return the state after one step of the optimizer.

        Args:
            grads: gradients of `graphstate`: the same tree, or a nested dict of the same paths.
            **extra: further arguments of the optimizer: `value` (the loss) for
                `optax.contrib.reduce_on_plateau`; for a line search `value`, `grad` (the
                gradients) and `value_fn`, a function from a tree like `graphstate` to the loss.

        Raises:
            NotInitializedError: if there is no optimizer or no optimizer state; it is an
                AssertionError.
            TreeStructureError: if the gradients do not fit the parameters; lists all differences.
            ArgumentError: if no part of the optimizer uses one of `extra`.
            TypeError: raised by Optax if the optimizer needs an argument that is not given.
        """
        require_optimizer(
            self.tx,
            self.opt_state,
            path="apply_gradients",
            next_step="create the state with tx= and init_opt_state=True, or call init_tx",
        )
        assert self.tx is not None
        graphstate, opt_state = take_step(
            self.tx, grads, self.opt_state, self.graphstate, extra, path="apply_gradients"
        )
        stepped = self.replace(
            step=self.step + 1, graphstate=graphstate, opt_state=opt_state, rng_reuse=_NO_REUSE
        )
        drawn = drawn_streams(self.__dict__.get("_streams", ()))
        if not drawn:
            return stepped
        if isinstance(stepped.step, jax.core.Tracer):
            return stepped.replace(rng_reuse=RngReuse(drawn, graphother_id=id(stepped.graphother)))
        object.__setattr__(stepped, "_drawn", drawn)
        return stepped

    def init_tx(
        self,
        tx: optax.GradientTransformation,
        partition_rules: Any = None,
        *,
        tx_init: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the state with another optimizer and a new optimizer state, made on its devices.

        Args:
            tx: the optimizer.
            partition_rules: rules for parameters, whose shardings the optimizer's leaves get; None
                for the parameters' present shardings.
            tx_init: JSON that rebuilds `tx`.
        """
        placed = None if partition_rules is None else params_by_rules(self, partition_rules)
        opt_state = init_optimizer(tx, self.graphstate, placed)
        return self.replace(tx=tx, tx_init=tx_init, opt_state=opt_state)

    def init_opt_state(self) -> Self:
        """Return the state with a new optimizer state for its optimizer.

        Raises:
            NotInitializedError: if there is no optimizer.
        """
        if self.tx is None:
            raise NotInitializedError(
                path="init_opt_state", expected="an optimizer", found="tx=None"
            )
        return self.init_tx(self.tx, tx_init=self.tx_init)

    def free_opt_state(self) -> Self:
        """Return the state without optimizer state, so that its memory can be freed."""
        return self.replace(opt_state=None)
