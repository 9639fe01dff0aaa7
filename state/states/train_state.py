"""TrainState: parameters, optimizer state and step of any JAX model, as one pytree."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, SupportsIndex

import jax
import optax
from flax import struct

from cairn.interop.errors import ArgumentError
from cairn.state.checkpointing.save_handle import SaveHandle
from cairn.state.errors import NotInitializedError
from cairn.state.paths import own_variables
from cairn.state.sharding.mesh import home_of
from cairn.state.sharding.states import place_step
from cairn.state.states.added_fields import added_fields, check_added
from cairn.state.states.checkpoint import run_has_saved
from cairn.state.states.equinox_module import check_leaves, is_equinox, take_apart
from cairn.state.states.optimizer_step import take_step
from cairn.state.states.optimizers import init_optimizer
from cairn.state.states.state_save import StateSaveOptions
from cairn.state.states.state_table import state_table
from cairn.state.states.train_state_storage import load_train_state, save_train_state
from cairn.storage.arrays.data_files import Compression
from cairn.storage.notebooks import never_raises
from cairn.storage.runs.damage import OnDamage
from cairn.storage.runs.records.annotations import Better

__all__ = ["TrainState"]


class TrainState(struct.PyTreeNode, eq=False, kw_only=True):  # type: ignore[call-arg]  # flax is untyped
    """Parameters in training, of Linen, NNX, Equinox or a plain tree of arrays.

    A subclass adds fields, such as `epoch`, `batch_stats` or `metrics`, with defaults or without:

        class MyState(TrainState):
            batch_stats: Any
            epoch: int = 0

    Such fields are part of the pytree, and are saved and restored; `apply_gradients` changes them
    only if they are passed to it. Their values are arrays, PRNG keys, Python numbers, nested
    containers of these, or None. A field made with `flax.struct.field(pytree_node=False)` is
    static: it must be hashable, is no part of the pytree, and is not saved; a loaded state has the
    value of the target of `load_state`.

    `create` also accepts a whole Equinox module. Then `params` is a module of the same class with
    its floating arrays, and None for other leaves; `apply_fn(params, *args)` calls the whole
    module.

    Attributes:
        step: number of optimizer steps taken, an int32 scalar.
        params: the parameters.
        tx: the optimizer; None without.
        opt_state: the optimizer's state; None without.
        apply_fn: the function that applies the model; None without.
    """

    step: Any
    params: Any
    tx: optax.GradientTransformation | None = struct.field(pytree_node=False, default=None)
    opt_state: Any = None
    apply_fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Comparing arrays gives arrays, not a bool, so states have no equality.
        super().__init_subclass__(**{"eq": False, "kw_only": True, **kwargs})

    @never_raises
    def _repr_html_(self) -> str:
        added = added_fields(self, TrainState)
        parts = {"params": self.params, "opt_state": self.opt_state, **added}
        return state_table(type(self).__name__, parts, [])

    @classmethod
    def create(
        cls,
        *,
        params: Any,
        tx: optax.GradientTransformation | None = None,
        apply_fn: Callable[..., Any] | None = None,
        opt_state: Any = None,
        step: int | jax.Array = 0,
        **fields: Any,
    ) -> Self:
        """Return a new state.

        Args:
            params: the parameters, or a whole Equinox module.
            tx: the optimizer.
            apply_fn: the function that applies the model. For a whole Equinox module, it is called
                with that module in place of the parameters; None calls the module itself.
            opt_state: the optimizer's state; None to make a new one for `tx`, sharded like the
                parameters.
            step: number of steps taken so far.
            **fields: values of the fields that a subclass adds.

        Raises:
            ArgumentError: if a field is unknown or missing, an optimizer state is given without an
                optimizer, or leaves of `params` are no arrays (all are listed).
        """
        check_added(cls, TrainState, fields)
        if tx is None and opt_state is not None:
            raise ArgumentError(path=f"{cls.__name__}.create", expected="tx with opt_state")
        if is_equinox(params):
            params, apply_fn = take_apart(params, apply_fn)
        else:
            check_leaves(params)
            params = own_variables(params)
        if tx is not None and opt_state is None:
            opt_state = init_optimizer(tx, params)
        return cls(
            step=place_step(step, home_of(params)),
            params=params,
            tx=tx,
            opt_state=opt_state,
            apply_fn=apply_fn,
            **fields,
        )

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Return the state after one step of the optimizer.

        Args:
            grads: gradients of `params`.
            **kwargs: new values of fields that a subclass adds. Other names are arguments of the
                optimizer: `value` (the loss) for `optax.contrib.reduce_on_plateau`; for a line
                search `value`, `grad` (the gradients) and `value_fn`, a function from parameters to
                the loss.

        Raises:
            NotInitializedError: if there is no optimizer or no optimizer state.
            TreeStructureError: if the gradients do not fit the parameters; lists all differences.
            ArgumentError: if a keyword is no added field and no part of the optimizer uses it; or
                if it is both a field and an argument that the optimizer uses.
            TypeError: raised by Optax if the optimizer needs an argument that is not given.
        """
        if self.tx is None or self.opt_state is None:
            raise NotInitializedError(
                path="apply_gradients",
                expected="an optimizer and its state",
                found="none",
                next_step="create the state with tx=",
            )
        own = {field.name for field in dataclasses.fields(TrainState)}
        added = {field.name for field in dataclasses.fields(self)} - own
        fields = {name: value for name, value in kwargs.items() if name in added}
        params, opt_state = take_step(
            self.tx,
            grads,
            self.opt_state,
            self.params,
            kwargs,
            path=f"{type(self).__name__}.apply_gradients",
            fields=added,
        )
        stepped: Self = self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **fields
        )
        return stepped

    @property
    def added_fields(self) -> dict[str, Any]:
        """Values of the fields that a subclass adds to the pytree, by name."""
        return added_fields(self, TrainState)

    @property
    def extras(self) -> dict[str, Any]:
        """JSON that was passed to `save_state(extras=...)`, on a loaded state; {} on any other.

        States that are made from the loaded one do not have it.
        """
        extras: dict[str, Any] = self.__dict__.get("_extras", {})
        return extras

    def save_state(
        self,
        save_directory: str | os.PathLike[str],
        *,
        step: SupportsIndex | None = None,
        wait: bool = False,
        overwrite: bool = False,
        verbose: bool = True,
        save_optimizer: bool = True,
        enable: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        better: Mapping[str, Better] | None = None,
        labels: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
        iterators: Mapping[str, Any] | None = None,
        compression: Compression | None = None,
        deadline: float | None = None,
    ) -> SaveHandle:
        """Save the state as a checkpoint of a run; see `EasyDeLState.save_state`.

        The parameters are the item `model`, the fields of a subclass the item `fields`.
        """
        options = StateSaveOptions(
            step=step,
            wait=wait,
            overwrite=overwrite,
            verbose=verbose,
            save_optimizer=save_optimizer,
            enable=enable,
            metrics=metrics,
            better=better,
            labels=labels,
            extras=extras,
            iterators=iterators,
            compression=compression,
            deadline=deadline,
        )
        return save_train_state(self, save_directory, options)

    @classmethod
    def load_state(
        cls,
        load_directory: str | os.PathLike[str],
        target: Self,
        *,
        step: SupportsIndex | None = None,
        optimizer: Literal["require", "skip"] = "require",
        iterators: Mapping[str, Any] | None = None,
        damaged: OnDamage = "refuse",
    ) -> Self:
        """Return a stored state with the structure and shardings of a target, which is unchanged.

        The target may be on another mesh than the saved state. Leaves that are uncommitted in the
        target are uncommitted in the result. An abstract target has no arrays:
        `jax.eval_shape(lambda: MyState.create(...))`; its leaves may have shardings, and are loaded
        onto the first device otherwise. A Python number in the target needs a stored number of its
        kind. A number that was a Python number when it was saved is one again if the target is
        abstract. Optimizer state keeps its stored floating dtypes, since some optimizers change
        them in their first step.

        Args:
            load_directory: "run" (its latest step), "run@alias" or "run/steps/N".
            target: a state of the same structure, or an abstract one; its values are not used. The
                result has its static fields, optimizer and `apply_fn`; if these are the objects of
                a compiled step, that step need not compile again.
            step: the step to load, if the reference names only a run; None for the latest.
            optimizer: "require" or "skip", which leaves the optimizer state None.
            iterators: iterators of training data, by name; each is set, in place, to its position
                at the time of the save, once all else is loaded; see `cairn.load`.
            damaged: what to do if no step is named, and the latest has a record of damage: "refuse"
                raises, "skip" loads the newest undamaged step; see `cairn.load`.

        Raises:
            StepDamagedError: if the latest step is damaged, and `damaged` is "refuse".
            FileNotFoundError: if there is no such run, alias or step.
            OptimizerNotFoundError: if the target has optimizer state and the checkpoint has none.
            OptimizerError: if the checkpoint has optimizer state and the target has none.
            TreeMismatchError: if the checkpoint does not fit; all differences are listed.
            IteratorMismatchError: if an iterator can't resume at the step's position; see
                `cairn.load`.
            ArgumentError: if the target is no state of this class.
        """
        if not isinstance(target, cls):
            raise ArgumentError(
                path=f"{cls.__name__}.load_state: target",
                expected=f"a {cls.__name__}, or what jax.eval_shape makes of one",
                found=type(target).__name__,
            )
        loaded = load_train_state(
            target,
            load_directory,
            step=step,
            optimizer=optimizer,
            iterators=iterators,
            damaged=damaged,
        )
        same_class: Self = loaded
        return same_class

    @classmethod
    def load_or_create(
        cls,
        uri: str | os.PathLike[str],
        create: Callable[[], Self],
        *,
        target: Self | None = None,
        **arguments: Any,
    ) -> Self:
        """Load the latest checkpoint of a run, or create a first state if the run has none yet.

        A job can call this at its first start and at every restart.

        Args:
            uri: the run, or a checkpoint of it.
            create: function that returns the first state.
            target: target of the load, see `load_state`; None for the result of `create`, which
                then needs memory during the load.
            **arguments: arguments of `load_state`.

        Raises:
            StepDamagedError: the latest step is damaged; `damaged="skip"` resumes from the newest
                undamaged step.
            FileNotFoundError: as in `load_state`, except for a run without checkpoints.
            ValueError: as in `load_state`; or the folder is no run, but has other checkpoints.
            CorruptionError: as in `load_state`; or records of the run are lost, so that it can't
                be known whether there are checkpoints.
        """
        if not run_has_saved(uri):
            return create()
        return cls.load_state(uri, create() if target is None else target, **arguments)
