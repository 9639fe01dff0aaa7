"""TrainState: parameters, optimizer state and step of any JAX model, as one pytree."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import jax
import numpy as np
import optax
from flax import struct

from state.errors import ArgumentError, NotInitializedError, OptimizerNotFoundError
from state.mesh import mesh_of
from state.optax_numerics import optax_numerics
from state.optimizer_sharding import init_optimizer
from state.paths import rebuild
from state.state_saving import SaveArguments, store
from state.state_sharding import place_step

if TYPE_CHECKING:
    from storage.checkpointer import SaveHandle

__all__ = ["TrainState"]

_OWN_FIELDS = frozenset({"step", "params", "tx", "opt_state", "apply_fn"})


class TrainState(struct.PyTreeNode, eq=False):  # type: ignore[call-arg]  # flax is untyped
    """Parameters in training, of Linen, NNX, Equinox or a plain tree of arrays.

    A subclass adds fields, such as `epoch`, `batch_stats` or `metrics`. They are part of the tree,
    `apply_gradients` leaves them alone unless they are passed to it, and they are saved and
    restored like everything else:

        class MyState(TrainState, eq=False):
            batch_stats: Any = None

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
        """Makes a state; the optimizer's is made where the parameters are, unless it is given.

        Args:
            params: the parameters.
            tx: the optimizer.
            apply_fn: the function that applies the model.
            opt_state: the optimizer's state.
            step: steps taken so far.
            **fields: those that a subclass added.

        Raises:
            ArgumentError: if a field is unknown, or an optimizer state comes without optimizer.
        """
        known = {field.name for field in dataclasses.fields(cls)} - _OWN_FIELDS
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ArgumentError(
                path=f"{cls.__name__}.create",
                expected=f"fields among {', '.join(sorted(known)) or 'none of its own'}",
                found=", ".join(unknown),
            )
        if tx is None and opt_state is not None:
            raise ArgumentError(path=f"{cls.__name__}.create", expected="tx with opt_state")
        if tx is not None and opt_state is None:
            opt_state = init_optimizer(tx, params)
        return cls(
            step=place_step(step, mesh_of(params)),
            params=params,
            tx=tx,
            opt_state=opt_state,
            apply_fn=apply_fn,
            **fields,
        )

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Returns the state after one step of the optimizer.

        Args:
            grads: gradients of `params`.
            **kwargs: new values of other fields.

        Raises:
            NotInitializedError: if there is no optimizer or no optimizer state.
            TreeStructureError: if the gradients do not fit the parameters; lists every leaf.
        """
        if self.tx is None or self.opt_state is None:
            raise NotInitializedError(
                path="apply_gradients",
                expected="an optimizer and its state",
                found="none",
                next_step="create the state with tx=",
            )
        grads = rebuild(self.params, grads, path="grads")
        with optax_numerics():
            updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
            params = optax.apply_updates(self.params, updates)
        stepped: Self = self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )
        return stepped

    @property
    def extras(self) -> dict[str, Any]:
        """What `save_state(extras=...)` kept, on a state that was just loaded; {} on any other."""
        extras: dict[str, Any] = self.__dict__.get("_extras", {})
        return extras

    def save_state(
        self,
        save_directory: str | os.PathLike[str],
        *,
        step: int | None = None,
        wait: bool = False,
        overwrite: bool = False,
        verbose: bool = True,
        save_optimizer: bool = True,
        enable: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> "SaveHandle":
        """Saves the state as a checkpoint of a run; the arguments are `EasyDeLState.save_state`'s.

        The parameters are the item `model`, the fields of a subclass the item `fields`.
        """
        arguments = SaveArguments(
            step=step,
            wait=wait,
            overwrite=overwrite,
            verbose=verbose,
            save_optimizer=save_optimizer,
            enable=enable,
            metrics=metrics,
            labels=labels,
            extras=extras,
        )
        items = {"model": self.params}
        if save_optimizer and self.opt_state is not None:
            items["optimizer"] = self.opt_state
        if jax.tree.leaves(self._own_fields()):
            items["fields"] = self._own_fields()
        meta = {"model_class": None, "model_type": None, "config": None, "tx_init": None}
        return store(self.step, save_directory, items, meta, arguments)

    @classmethod
    def load_state(
        cls,
        load_directory: str | os.PathLike[str],
        target: Self,
        *,
        step: int | None = None,
        optimizer: Literal["require", "skip"] = "require",
    ) -> Self:
        """Loads a state into the form of another one.

        Args:
            load_directory: "run" (its latest step), "run@alias" or "run/steps/N".
            target: a state of the same structure, or an abstract one (`jax.eval_shape`): it says
                where each leaf goes; its values are not used.
            step: the step to load, where the reference names only a run.
            optimizer: "skip" leaves the target's optimizer state out (None).

        Raises:
            FileNotFoundError: if there is no such run, alias or step.
            OptimizerNotFoundError: if the target has optimizer state and the checkpoint has none.
            TreeMismatchError: if the checkpoint does not fit; every leaf is listed.
        """
        from state.checkpoint import StoredCheckpoint

        checkpoint = StoredCheckpoint.open(load_directory, step=step)
        targets = {"model": target.params}
        if optimizer == "require" and target.opt_state is not None:
            if "optimizer" not in checkpoint.items:
                raise OptimizerNotFoundError(
                    path=checkpoint.uri,
                    expected="an item 'optimizer'",
                    found=f"items {', '.join(checkpoint.items)}",
                    next_step="pass optimizer='skip' to load without it",
                )
            targets["optimizer"] = target.opt_state
        if jax.tree.leaves(target._own_fields()):
            targets["fields"] = target._own_fields()
        abstract = {item: jax.tree.map(_abstract, tree) for item, tree in targets.items()}
        checkpoint.check(abstract)
        restored = {item: checkpoint.restore(item, tree) for item, tree in abstract.items()}
        restored = {
            item: jax.tree.map(_like, targets[item], tree) for item, tree in restored.items()
        }
        loaded: Self = target.replace(
            step=place_step(checkpoint.meta["step"], mesh_of(restored["model"])),
            params=restored["model"],
            opt_state=restored.get("optimizer"),
            **restored.get("fields", {}),
        )
        object.__setattr__(loaded, "_extras", dict(checkpoint.meta.get("extras") or {}))
        return loaded

    def _own_fields(self) -> dict[str, Any]:
        """The fields that a subclass added and that are part of the tree."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _OWN_FIELDS and field.metadata.get("pytree_node", True)
        }


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.asarray(leaf)  # NumPy arrays and Python numbers stay on the host


def _like(target: Any, leaf: Any) -> Any:
    """Gives a Python number back as one."""
    if isinstance(target, bool | int | float | complex):
        return type(target)(leaf)
    return leaf
