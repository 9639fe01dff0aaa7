"""TrainStep: one step of training as one compiled function, for TrainState and EasyDeLState."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cairn.counts import count_text
from cairn.interop.errors import ArgumentError
from cairn.state.errors import TreeStructureError, require_optimizer
from cairn.state.paths import named_leaves, rebuild
from cairn.state.sharding.mesh import mesh_of
from cairn.state.sharding.put import put_leaf
from cairn.state.states.easydel_state import EasyDeLState
from cairn.state.states.optimizer_step import used_arguments
from cairn.state.states.train_state import TrainState

__all__ = ["TrainStep"]

State = TypeVar("State", TrainState, EasyDeLState)

_OWN_METRICS = ("loss", "grad_norm")


class TrainStep:
    """Compiled training step: computes loss and gradients, applies them, returns state and metrics.

    It is made from a loss function and called with a state and a batch:

        def loss_fn(state, params, batch):
            outputs, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"], train=True, mutable=["batch_stats"],
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"]).mean()
            accuracy = (outputs.argmax(-1) == batch["label"]).mean()
            return loss, {"batch_stats": changed["batch_stats"], "accuracy": accuracy}

        train_step = TrainStep(loss_fn)
        state, metrics = train_step(state, batch)   # {"loss", "grad_norm", "accuracy"}

    `loss_fn(state, params, batch, **inputs)` returns the loss, a floating scalar; or a pair of the
    loss and a dict. It must compute the loss from `params`, not from the state's own parameters.
    With a TrainState, `params` replaces `state.params`; with an EasyDeLState, the model is
    `state.merge(params)`. In the dict, an entry with the name of an added field (`batch_stats`,
    `metrics`) is the field's new value; so is `graphother` of an EasyDeLState (statistics, random
    counters: `nnx.split(model, nnx.Param, ...)[2]`). All other entries are returned as metrics,
    together with `loss` and `grad_norm` (the global norm, float32).

    If the optimizer needs them, it gets the loss (`value`), the gradients (`grad`) and the loss as
    a function of the parameters (`value_fn`), as `optax.contrib.reduce_on_plateau` and line
    searches (`optax.lbfgs`) do. A field of a TrainState must not have the name of an argument that
    its optimizer uses.

    A field's new value must have the same leaves as the old one. All leaves keep their shardings,
    so that the step compiles only once. The state that is passed in is donated: its arrays can't
    be used afterwards.

    Attributes:
        loss_fn: the loss function.
        donate: whether the state that is passed in is donated.
        traces: number of times that the step was traced and compiled; 1 for any number of calls
            with the same tree structures, shapes, dtypes and shardings.
    """

    def __init__(self, loss_fn: Callable[..., Any], *, donate: bool = True) -> None:
        """Store the step's loss function; compile nothing yet.

        Args:
            loss_fn: the loss function; see the class.
            donate: whether to donate the state that is passed in; False keeps it usable.
        """
        if not callable(loss_fn):
            raise ArgumentError(
                path="TrainStep: loss_fn", expected="a function", found=type(loss_fn).__name__
            )
        self.loss_fn = loss_fn
        self.donate = donate
        self.traces = 0
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, state: State, batch: Any, **inputs: Any
    ) -> tuple[State, dict[str, jax.Array]]:
        """Compute the loss and its gradients, and apply them with the optimizer.

        Args:
            state: a state with an optimizer; its leaves may be sharded over one mesh.
            batch: tree of arrays for the loss function; its shardings decide how the computation
                is distributed.
            **inputs: further trees of arrays for the loss function, such as a random key.

        Returns:
            The new state, and the metrics: "loss", "grad_norm" and those of the loss function.

        Raises:
            NotInitializedError: the state has no optimizer.
            ArgumentError: the loss is no floating scalar; the loss function's dict has the name
                "loss", "grad_norm" or of a field that it can't change; or a field has the name of
                an argument that the optimizer uses.
            TreeStructureError: the new value of a field has other leaves or dtypes; lists them.
        """
        _check_state(state)
        leaves, structure = jax.tree.flatten(state)
        leaves = _ready(leaves, mesh_of(leaves))
        places = tuple(_pinned(leaf) for leaf in leaves)
        compiled = self._compiled.get((structure, places))
        if compiled is None:
            compiled = jax.jit(
                self._traced,
                donate_argnums=0 if self.donate else (),
                out_shardings=(jax.tree.unflatten(structure, places), None),
            )
            self._compiled[structure, places] = compiled
        stepped: tuple[State, dict[str, jax.Array]] = compiled(
            jax.tree.unflatten(structure, leaves), batch, inputs
        )
        return stepped

    def update(self, state: State, batch: Any, **inputs: Any) -> tuple[State, dict[str, jax.Array]]:
        """Do one step without compiling it: for use in a function under jit, or in a debugger.

        Arguments, results and errors are those of a call. Nothing is donated or moved to another
        device.
        """
        _check_state(state)
        is_train_state = isinstance(state, TrainState)
        params = state.params if is_train_state else state.graphstate
        (loss, aux), grads = jax.value_and_grad(self._loss, argnums=1, has_aux=True)(
            state, params, batch, inputs
        )
        changed, metrics = _sorted_out(state, aux)
        offered = {
            "value": loss,
            "grad": grads,
            "value_fn": lambda params: self._loss(state, params, batch, inputs)[0],
        }
        used = used_arguments(state.tx, grads, state.opt_state, params, offered)
        extra = {name: offered[name] for name in used}
        if isinstance(state, TrainState):
            stepped: Any = state.apply_gradients(grads=grads, **{**extra, **changed})
        else:
            stepped = state.apply_gradients(grads=grads, **extra).replace(**changed)
        # The norm of all gradients together, summed in float32.
        squares = [jnp.square(jnp.abs(leaf).astype(jnp.float32)) for leaf in jax.tree.leaves(grads)]
        grad_norm = jnp.sqrt(sum((square.sum() for square in squares), start=jnp.float32(0)))
        return stepped, {"loss": loss, "grad_norm": grad_norm, **metrics}

    def _traced(self, state: Any, batch: Any, inputs: Mapping[str, Any]) -> Any:
        self.traces += 1
        return self.update(state, batch, **inputs)

    def _loss(self, state: Any, params: Any, batch: Any, inputs: Mapping[str, Any]) -> Any:
        returned = self.loss_fn(state, params, batch, **inputs)
        pair = isinstance(returned, tuple) and len(returned) == 2
        loss, aux = returned if pair else (returned, {})
        shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
        if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            kind = type(loss).__name__ if shape is None else f"{dtype} of shape {shape}"
            raise ArgumentError(
                path="TrainStep: the loss",
                expected="a floating scalar, or a pair of one and a dict",
                found=kind,
                next_step="take the mean, or the sum, over the batch",
            )
        if not isinstance(aux, Mapping):
            raise ArgumentError(
                path="TrainStep: what comes with the loss",
                expected="a dict of fields and metrics",
                found=type(aux).__name__,
            )
        return loss, dict(aux)


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState | EasyDeLState):
        raise ArgumentError(
            path="TrainStep: state",
            expected="a TrainState or an EasyDeLState",
            found=type(state).__name__,
        )
    require_optimizer(
        state.tx,
        state.opt_state,
        path="TrainStep: state",
        next_step="create the state with tx= (EasyDeLState: and init_opt_state=True)",
    )


def _sorted_out(state: Any, aux: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the loss function's dict as two: new values of fields, and metrics.

    Raises:
        ArgumentError: a name is that of another field, or of a metric that the step computes.
        TreeStructureError: a new value has other leaves or dtypes than the old one.
    """
    if isinstance(state, TrainState):
        fields = state.added_fields
    else:
        fields = {"graphother": state.graphother, **state.added_fields}
    every = {field.name for field in dataclasses.fields(state)}
    refused = [name for name in aux if name in (every | {*_OWN_METRICS}) - fields.keys()]
    if refused:
        raise ArgumentError(
            path="TrainStep: what comes with the loss",
            expected=f"fields among {', '.join(sorted(fields)) or 'none'}, and metrics "
            f"named unlike {', '.join(_OWN_METRICS)} and the state's other fields",
            found=", ".join(sorted(refused)),
        )
    changed = {
        name: _like(fields[name], value, name) for name, value in aux.items() if name in fields
    }
    return changed, {name: value for name, value in aux.items() if name not in fields}


def _like(old: Any, new: Any, name: str) -> Any:
    """Return a field's new value in the containers of the old one.

    Raises:
        TreeStructureError: the leaves or their dtypes differ from the old ones; lists them.
    """
    path = f"TrainStep: the new {name}"
    new = rebuild(old, new, path=path)
    problems = [
        f"{was.path or name}: expected {_dtype(was.leaf)}, found {_dtype(now.leaf)}"
        for was, now in zip(named_leaves(old), named_leaves(new), strict=True)
        if _dtype(was.leaf) != _dtype(now.leaf)
    ]
    if problems:
        raise TreeStructureError(
            count_text(len(problems), "leaf has another dtype", "leaves have another dtype"),
            path=path,
            expected="the dtypes of the old value",
            next_step="cast them in the loss function",
            problems=problems,
        )
    return new


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.asarray(leaf).dtype


def _ready(leaves: list[Any], mesh: Mesh | None) -> list[Any]:
    """Return a state's leaves in the form in which the step returns them, so that it compiles once.

    They are separate JAX arrays, not weakly typed, and on the mesh if there is one.
    """
    seen: set[int] = set()
    ready = []
    for leaf in leaves:
        placed = _placed(leaf, mesh)
        if placed is leaf and id(leaf) in seen:
            placed = jnp.copy(leaf)  # a buffer can be donated once
        seen.add(id(leaf))
        ready.append(placed)
    return ready


def _placed(leaf: Any, mesh: Mesh | None) -> Any:
    if not isinstance(leaf, jax.Array):
        leaf = jnp.asarray(leaf, _dtype(leaf))
    elif getattr(leaf, "weak_type", False):
        leaf = leaf.astype(leaf.dtype)  # the step returns it typed, and would recompile
    if mesh is None or _pinned(leaf) is not None:
        return leaf
    return put_leaf(leaf, NamedSharding(mesh, PartitionSpec()))


def _pinned(leaf: Any) -> NamedSharding | None:
    place = getattr(leaf, "sharding", None)
    return place if isinstance(place, NamedSharding) else None
