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
    """A model at one point of its training.

    A pytree: `step`, `graphstate`, `graphother` and `opt_state` are its leaves; the rest is static
    and hashable. Methods return new objects. A training step compiles once, and may have the memory
    of the state that it replaces; leaves stay where they are:

        step = jax.jit(train_step, donate_argnums=0)
        state, loss = step(state, batch)

    A subclass adds fields:

        class MyState(EasyDeLState):
            ema: Any = None

        state = MyState.create(model=model, ema=jax.tree.map(jnp.copy, model.graphstate))

    They are part of the tree, `apply_gradients` leaves them alone, and they are saved and restored
    like everything else: arrays, PRNG keys, Python numbers, nested containers of these, or None.
    `load_state` needs `fields=` for containers that JSON can't name, such as Optax's. A field made
    with `flax.struct.field(pytree_node=False)` is static instead: hashable, and not saved; a load
    gives it its default, or the value in `fields=`.

    Attributes:
        step: optimizer steps taken, an int32 scalar.
        graphdef: static structure of the model.
        graphstate: the parameters that training changes.
        graphother: the model's other variables: batch statistics, random keys, frozen weights.
        tx: the optimizer.
        opt_state: its state, or None.
        apply_fn: a function to apply the model, if you want to keep one here.
        hyperparameters: JSON that is saved with the state.
        tx_init: JSON that rebuilds `tx`; see `cairn.state.states.optimizers.make_optimizer`.
        placement: where leaves are that rules and axis names would put elsewhere; kept by itself.
        rng_reuse: random streams that a step drew from and did not carry on; kept by itself.
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
                # What was noted of another `graphother` does not hold for this one.
                if self.rng_reuse.graphother_id != id(self.graphother):
                    object.__setattr__(self, "rng_reuse", _NO_REUSE)
            elif isinstance(self.step, jax.Array):
                self.rng_reuse.check(self)
        for name in ("hyperparameters", "tx_init"):
            value = getattr(self, name)
            if isinstance(value, Mapping) and not isinstance(value, FrozenJSON):
                object.__setattr__(self, name, FrozenJSON(value, name=name))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Arrays have no equality that fits in one truth value, so that states have none either.
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
        # The static parts can't change; copies of them would compile every step anew.
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
            step: steps taken so far, 0 by default.
            graphdef: static structure of the model; with `graphstate` and `graphother`.
            graphstate: the parameters.
            graphother: the other variables.
            model: the module, instead of these three.
            tx: the optimizer.
            opt_state: its state.
            init_opt_state: make the optimizer state, each leaf directly where it belongs.
            apply_fn: a function to apply the model.
            hyperparameters: JSON to keep with the state.
            tx_init: JSON that rebuilds `tx`.
            **fields: those that a subclass added.

        Raises:
            ArgumentError: if a field is unknown or missing.
            ValueError: if a model comes with parts of one, if some parts are missing, if
                `init_opt_state` comes with an `opt_state`, or without a `tx`, if `step` is no
                whole number.
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
            # Optax makes counters on the first device: a step would move them, and compile again.
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
        """The model made of this state; merged once, then kept. Changing it changes no state."""
        if "_model" not in self.__dict__:
            object.__setattr__(self, "_model", self.merge(self.graphstate))
        return self.__dict__["_model"]

    @property
    def module(self) -> Any:
        """The model; its older name."""
        return self.model

    @property
    def module_config(self) -> Any:
        """The model's configuration, or None if the module has none."""
        return getattr(self.model, "config", None)

    @property
    def module_config_args(self) -> dict[str, Any]:
        """The model's configuration as JSON."""
        return {} if self.module_config is None else dict(self.module_config.to_dict())

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as a nested dict of arrays."""
        pure: dict[str, Any] = nnx.to_pure_dict(self.graphstate)
        return pure

    @property
    def extras(self) -> dict[str, Any]:
        """JSON of `save_state(extras=...)`, on a state that was just loaded; {} on any other."""
        extras: dict[str, Any] = self.__dict__.get("_extras", {})
        return extras

    @classmethod
    def added_field_names(cls, *, static: bool = False) -> list[str]:
        """Return the names of the fields that a subclass added: in the tree, or the static ones."""
        return added_names(cls, EasyDeLState, static=static)

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any], *, path: str) -> None:
        """Check values of added fields, to make a state with.

        Raises:
            ArgumentError: if a field is unknown, or one without default has no value; names all.
        """
        check_added(cls, EasyDeLState, fields, path=path)

    @property
    def added_fields(self) -> dict[str, Any]:
        """The values of these fields."""
        return added_fields(self, EasyDeLState)

    def merge(self, tree: Any) -> Any:
        """Return the model with the parameters of `tree`, an NNX State or a nested dict.

        What a call of it changes, such as a dropout's counter, is the model's alone: a step takes
        it over as `graphother`, or draws the same numbers again and is warned of it.

        Raises:
            TreeStructureError: if they are not exactly the state's; lists every difference.
        """
        tree = rebuild(self.graphstate, tree, path="parameters")
        # Without the copy a dropout's counter, say, would change in the state itself.
        model = nnx.merge(self.graphdef, tree, self.graphother, copy=True)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
            warn_of_reuse(self.__dict__.get("_drawn", ()))
            self.__dict__.setdefault("_streams", []).extend(random_streams(model))
        return model

    def merge_to_state(self, tree: Any) -> Self:
        """Return the state with other parameters, an NNX State or a nested dict.

        Raises:
            TreeStructureError: if they are not exactly the state's; lists every difference.
        """
        return self.replace(graphstate=rebuild(self.graphstate, tree, path="parameters"))

    @property
    def size(self) -> int:
        """Bytes of `graphstate` and `opt_state`, each leaf counted once."""
        return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves((self.graphstate, self.opt_state)))

    # -- training ------------------------------------------------------------------------------

    def apply_gradients(self, *, grads: Any, **extra: Any) -> Self:
        """Return the state after one step of the optimizer.

        Args:
            grads: gradients of `graphstate`: the same tree, or a nested dict of the same paths.
            **extra: what the optimizer takes besides: `value` (the loss) for
                `optax.contrib.reduce_on_plateau`, and for a line search `value`, `grad` (the
                gradients) and `value_fn`, which gets a tree like `graphstate` and returns the loss.

        Raises:
            NotInitializedError: if there is no optimizer or no optimizer state (AssertionError).
            TreeStructureError: if the gradients do not fit the parameters; lists every leaf.
            ArgumentError: if the optimizer uses one of `extra` nowhere.
            TypeError: from Optax, if it needs one that is not there.
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
        """Return the state with this optimizer, whose state is made directly on its devices.

        Args:
            tx: the optimizer.
            partition_rules: where the mirrored parameters would be; by default where they are.
            tx_init: JSON that rebuilds `tx`.
        """
        placed = None if partition_rules is None else params_by_rules(self, partition_rules)
        opt_state = init_optimizer(tx, self.graphstate, placed)
        return self.replace(tx=tx, tx_init=tx_init, opt_state=opt_state)

    def init_opt_state(self) -> Self:
        """Return the state with a fresh optimizer state for the present optimizer.

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
