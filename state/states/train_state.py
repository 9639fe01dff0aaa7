"""TrainState: parameters, optimizer state and step of any JAX model, as one pytree."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, SupportsIndex

import jax
import optax
from flax import struct

from cairn.interop.errors import ArgumentError
from cairn.state.checkpointing.saves.save_handle import SaveHandle
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

__all__ = ["TrainState"]


class TrainState(struct.PyTreeNode, eq=False, kw_only=True):  # type: ignore[call-arg]  # flax is untyped
    """Parameters in training, of Linen, NNX, Equinox or a plain tree of arrays.

    A subclass adds fields, such as `epoch`, `batch_stats` or `metrics`, with defaults or without:

        class MyState(TrainState):
            batch_stats: Any
            epoch: int = 0

    They are part of the tree, `apply_gradients` leaves them alone unless they are passed to it, and
    they are saved and restored like everything else: arrays, PRNG keys, Python numbers, nested
    containers of these, or None. A field made with `flax.struct.field(pytree_node=False)` is static
    instead: hashable, no part of the tree, and not saved; it comes from the target of `load_state`.

    An Equinox module may be passed to `create` as it is: `params` are its floating arrays (the same
    class, None elsewhere), and `apply_fn(params, *args)` calls the whole module.

    Attributes:
        step: optimizer steps taken, an int32 scalar.
        params: the parameters.
        tx: the optimizer.
        opt_state: its state, or None.
        apply_fn: the function that applies the model, or None.
    """

    step: Any
    params: Any
    tx: optax.GradientTransformation | None = struct.field(pytree_node=False, default=None)
    opt_state: Any = None
    apply_fn: Callable[..., Any] | None = struct.field(pytree_node=False, default=None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Arrays have no equality that fits in one truth value, so that states have none either.
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
        """Make a state; the optimizer's is made where the parameters are, unless it is given.

        Args:
            params: the parameters, or a whole Equinox module.
            tx: the optimizer.
            apply_fn: the function that applies the model. With a whole Equinox module it is called
                with that module in place of the parameters; by default the module is called.
            opt_state: the optimizer's state.
            step: steps taken so far.
            **fields: those that a subclass added.

        Raises:
            ArgumentError: if a field is unknown or missing, an optimizer state comes without
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
            **kwargs: new values of fields that a subclass added. Other names are arguments of the
                optimizer: `value` (the loss) for `optax.contrib.reduce_on_plateau`, and for a line
                search `value`, `grad` (the gradients) and `value_fn`, from parameters to the loss.

        Raises:
            NotInitializedError: if there is no optimizer or no optimizer state.
            TreeStructureError: if the gradients do not fit the parameters; lists every leaf.
            ArgumentError: if a keyword names no field that a subclass added, and the optimizer
                uses it nowhere; or it names one like what the optimizer uses.
            TypeError: from Optax, if it needs an argument that is not there.
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
        """The fields that a subclass added and that are part of the tree."""
        return added_fields(self, TrainState)

    @property
    def extras(self) -> dict[str, Any]:
        """JSON of `save_state(extras=...)`, on a state that was just loaded; {} on any other."""
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
        labels: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
        iterators: Mapping[str, Any] | None = None,
        compression: Compression | None = None,
        deadline: float | None = None,
    ) -> SaveHandle:
        """Save the state as a checkpoint of a run; the arguments are `EasyDeLState.save_state`'s.

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
        """Load a state into the form of another one, which stays as it is.

        Each leaf goes where the target's is: on another mesh, if the target is there; what JAX may
        move in the target, it may move in what is loaded. An abstract
        target has no arrays: `jax.eval_shape(lambda: MyState.create(...))`. Its leaves may carry
        shardings; without one, they go to the first device. A Python number in the target takes a
        stored number of its kind, and a number that was saved from Python comes back as one into
        an abstract target. Optimizer state keeps the floating dtypes that it is stored in: some
        optimizers begin in others than they go on with.

        Args:
            load_directory: "run" (its latest step), "run@alias" or "run/steps/N".
            target: a state of the same structure, or an abstract one; its values are not used.
                Static fields, the optimizer and `apply_fn` come from it; if they are the very
                ones of a compiled step, that step goes on without compiling again.
            step: the step to load, where the reference names only a run.
            optimizer: "skip" leaves the optimizer state out (None).
            iterators: of training data, by name: they are set, in place, to where the step was
                saved, once all else is loaded; see `cairn.load`.
            damaged: what to do if no step is named, and the latest is known to be damaged:
                "refuse" it, or "skip" it for the newest sound one; see `cairn.load`.

        Raises:
            StepDamagedError: if the latest step is damaged, and not to be skipped.
            FileNotFoundError: if there is no such run, alias or step.
            OptimizerNotFoundError: if the target has optimizer state and the checkpoint has none.
            OptimizerError: if the checkpoint has optimizer state and the target has none.
            TreeMismatchError: if the checkpoint does not fit; every leaf is listed.
            IteratorMismatchError: if an iterator can't go on where the step was saved; see
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

        The same line serves the first start of a job and every restart.

        Args:
            uri: the run, or a checkpoint of it.
            create: makes the first state.
            target: what to load into, see `load_state`; by default what `create` makes, of which
                both are in memory for a while.
            **arguments: those of `load_state`.

        Raises:
            StepDamagedError: as `load_state`; `damaged="skip"` goes on from the newest sound step.
            FileNotFoundError: as `load_state`, but not for a run without any checkpoint.
            ValueError: as `load_state`; or the folder is no run, and holds other checkpoints.
            CorruptionError: as `load_state`; or records of the run are lost that would tell what
                was saved.
        """
        if not run_has_saved(uri):
            return create()
        return cls.load_state(uri, create() if target is None else target, **arguments)
