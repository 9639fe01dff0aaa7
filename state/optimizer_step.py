"""One step of an Optax optimizer, with what some take besides gradients.

Optax passes more arguments on to the parts of an optimizer that take any (`value` to
`reduce_on_plateau`, `value_fn` to a line search), and drops them in silence where none does. Here
what no part uses is refused: which ones are used shows in the traced update.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import jax
import optax
from jax.extend.core import Literal

from cairn.state.errors import ArgumentError, with_nearest
from cairn.state.optimizers import optax_numerics
from cairn.state.paths import rebuild

__all__ = ["take_step", "used_arguments"]

_USED: WeakKeyDictionary[Callable[..., Any], dict[frozenset[str], frozenset[str]]] = (
    WeakKeyDictionary()
)
"""By an optimizer's update: the names that were offered, and those of them that it uses."""


def take_step(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    extra: Mapping[str, Any],
    *,
    path: str,
    fields: set[str] | None = None,
) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer's state after one step.

    Args:
        tx: the optimizer.
        grads: gradients, in the tree of the parameters or a nested dict of the same paths.
        opt_state: the optimizer's state.
        params: the parameters.
        extra: more arguments of the optimizer; `grad` may be a nested dict too.
        path: what takes the step, for messages.
        fields: names that could have been meant instead, for messages.

    Raises:
        TreeStructureError: if gradients do not fit the parameters; lists every leaf.
        ArgumentError: if the optimizer uses an argument nowhere; names all of them.
    """
    grads = rebuild(params, grads, path="grads")
    if "grad" in extra:
        extra = {**extra, "grad": rebuild(params, extra["grad"], path="grad")}
    unused = sorted(set(extra) - used_arguments(tx, grads, opt_state, params, extra))
    if unused:
        named = sorted(fields or ())
        raise ArgumentError(
            path=path,
            expected=f"fields among {', '.join(named) or 'none of its own'}, or arguments that the "
            "optimizer uses"
            if fields is not None
            else "arguments that the optimizer uses",
            found=", ".join(with_nearest(name, named) for name in unused),
            next_step="leave them out, or give the optimizer a part that takes them, such as "
            "optax.contrib.reduce_on_plateau or a line search",
        )
    with optax_numerics():
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state


def used_arguments(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    offered: Mapping[str, Any],
) -> frozenset[str]:
    """Returns which of the offered arguments an optimizer uses.

    An array is used if the traced update reads it, a function if it is called. Traced once for
    each optimizer and names.

    Args:
        tx: the optimizer.
        grads: gradients, in the tree of the parameters.
        opt_state: the optimizer's state.
        params: the parameters.
        offered: arguments of the optimizer, by name.
    """
    names = _accepted(tx, offered)
    if not names:
        return frozenset()
    known = _USED.setdefault(tx.update, {})
    if names not in known:
        taken = {name: offered[name] for name in names}
        known[names] = _traced_use(tx, grads, opt_state, params, taken)
    return known[names]


def _accepted(tx: optax.GradientTransformation, offered: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names that the optimizer's update can be called with."""
    parameters = inspect.signature(tx.update).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    positional = [*parameters][:3]  # gradients, state, parameters
    return frozenset(
        name for name in offered if name not in positional and (takes_any or name in parameters)
    )


def _traced_use(
    tx: Any, grads: Any, opt_state: Any, params: Any, offered: Mapping[str, Any]
) -> frozenset[str]:
    used = {name for name, value in offered.items() if not _is_traceable(value)}
    functions = {name: value for name, value in offered.items() if _is_function(value)}
    used -= functions.keys()
    arrays = {name: offered[name] for name in offered.keys() - used - functions.keys()}
    rest = {name: offered[name] for name in used}
    watched = {name: _watched(value, name, used) for name, value in functions.items()}

    def update(grads: Any, opt_state: Any, params: Any, arrays: Any) -> Any:
        return tx.update(grads, opt_state, params, **arrays, **rest, **watched)

    with optax_numerics():
        jaxpr = jax.make_jaxpr(update)(grads, opt_state, params, arrays).jaxpr
    read = {
        id(variable)
        for variables in [*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars]
        for variable in variables
        if not isinstance(variable, Literal)
    }
    leaves = jax.tree_util.tree_flatten_with_path(arrays)[0]
    inputs = jaxpr.invars[len(jaxpr.invars) - len(leaves) :]
    for (path, _), variable in zip(leaves, inputs, strict=True):
        if id(variable) in read:
            used.add(path[0].key)
    return frozenset(used)


def _watched(function: Callable[..., Any], name: str, used: set[str]) -> Callable[..., Any]:
    @functools.wraps(function)  # Optax reads the signature
    def call(*arguments: Any, **keywords: Any) -> Any:
        used.add(name)
        return function(*arguments, **keywords)

    return call


def _is_function(value: Any) -> bool:
    """Says whether a value is a function, and not a module with arrays."""
    leaves = jax.tree.leaves(value)
    return callable(value) and len(leaves) == 1 and leaves[0] is value


def _is_traceable(value: Any) -> bool:
    """Says whether a value can be an input of a traced function; of others the use is not seen."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(
        hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for leaf in leaves
    )
