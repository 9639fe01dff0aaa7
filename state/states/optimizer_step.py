"""Step of an Optax optimizer, with extra arguments beside the gradients.

Optax passes extra arguments to the parts of an optimizer (`value` to `reduce_on_plateau`,
`value_fn` to a line search), and silently ignores those that no part uses. Here unused arguments
raise an error. To find them, the update is traced: an argument is used if an array is read, a
function called, or any other value (a flag, a text, a Python number) accessed.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, Never
from weakref import WeakKeyDictionary

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from cairn.interop.errors import ArgumentError, with_nearest
from cairn.state.paths import rebuild
from cairn.state.states.optimizers import optax_numerics

__all__ = ["take_step", "used_arguments"]

_ARGUMENTS: Final = frozenset({"value", "grad", "value_fn"})
"""Names of the extra arguments of Optax's own optimizers."""

Kind = Literal["arrays", "function", "other"]

_USED: WeakKeyDictionary[Callable[..., Any], dict[frozenset[tuple[str, Kind]], frozenset[str]]] = (
    WeakKeyDictionary()
)
"""Cache: an optimizer's `update` -> names and kinds of arguments -> names of the used ones."""


def take_step(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    arguments: Mapping[str, Any],
    *,
    path: str,
    fields: set[str] | None = None,
) -> tuple[Any, Any]:
    """Return the parameters and the optimizer's state after one step.

    Args:
        tx: the optimizer.
        grads: gradients, in the tree of the parameters or a nested dict of the same paths.
        opt_state: the optimizer's state.
        params: the parameters.
        arguments: the other arguments of the caller's method; `grad` may be a nested dict, too.
        path: name of the caller's method, for errors.
        fields: names of the state's fields; arguments of these names are not for the optimizer.

    Raises:
        TreeStructureError: if gradients do not fit the parameters; lists all differences.
        ArgumentError: if the optimizer does not use an argument, or uses one that has the name of
            a field; names all of these.
    """
    grads = rebuild(params, grads, path="grads")
    extra = {name: value for name, value in arguments.items() if name not in (fields or ())}
    if "grad" in extra:
        extra["grad"] = rebuild(params, extra["grad"], path="grad")
    own = {name: arguments[name] for name in _ARGUMENTS & arguments.keys() - extra.keys()}
    used = used_arguments(tx, grads, opt_state, params, {**own, **extra})
    if used & own.keys():
        raise ArgumentError(
            path=path,
            expected="fields that are named unlike what the optimizer takes",
            found=", ".join(sorted(used & own.keys())),
            next_step="rename the fields: they would get what is meant for the optimizer",
        )
    unused = sorted(extra.keys() - used)
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
    """Return the names of those arguments that an optimizer uses.

    The result is cached by optimizer, and names and kinds of arguments. If arguments like flags
    might change it, the update is traced again.

    Args:
        tx: the optimizer.
        grads: gradients, in the tree of the parameters.
        opt_state: the optimizer's state.
        params: the parameters.
        offered: extra arguments for the optimizer, by name.
    """
    parameters = inspect.signature(tx.update).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    positional = [*parameters][:3]  # gradients, state, parameters
    names = frozenset(
        name for name in offered if name not in positional and (takes_any or name in parameters)
    )
    if not names:
        return frozenset()
    kinds = {name: _kind_of(offered[name]) for name in names}
    cache, key = _USED.setdefault(tx.update, {}), frozenset(kinds.items())
    used = cache.get(key)
    if used is None or (used != names and "other" in kinds.values()):
        accepted = {name: offered[name] for name in names}
        used = (used or frozenset()) | _traced_use(tx, grads, opt_state, params, accepted, kinds)
        cache[key] = used
    return used


def _traced_use(
    tx: Any,
    grads: Any,
    opt_state: Any,
    params: Any,
    offered: Mapping[str, Any],
    kinds: Mapping[str, Kind],
) -> frozenset[str]:
    arrays = {name: value for name, value in offered.items() if kinds[name] == "arrays"}
    used: set[str] = set()
    functions = {
        name: _watched(value, name, used)
        for name, value in offered.items()
        if kinds[name] == "function"
    }
    others = {name: value for name, value in offered.items() if kinds[name] == "other"}
    while True:
        placeholders = {name: _Placeholder(name) for name in others.keys() - used}
        update = functools.partial(tx.update, **{**others, **placeholders, **functions})
        try:
            with optax_numerics():
                return frozenset(used | _read_names(update, grads, opt_state, params, arrays))
        except _LookError as exc:
            used.add(exc.name)
        except Exception:
            if not placeholders:
                raise
            used |= placeholders.keys()  # placeholders may be the cause: trace with the values


def _read_names(
    update: Callable[..., Any], grads: Any, opt_state: Any, params: Any, arrays: Mapping[str, Any]
) -> set[str]:
    """Return the names of the arrays that an update reads."""
    jaxpr = jax.make_jaxpr(lambda *inputs: update(*inputs[:3], **inputs[3]))(
        grads, opt_state, params, arrays
    ).jaxpr
    leaves = jax.tree_util.tree_flatten_with_path(arrays)[0]
    read = _read_inputs(jaxpr)[len(jaxpr.invars) - len(leaves) :]
    return {path[0].key for (path, _), is_read in zip(leaves, read, strict=True) if is_read}


def _read_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Return whether each input of a traced function is read, in the order of the inputs."""
    read = {variable for variable in jaxpr.outvars if isinstance(variable, Var)}
    for equation in jaxpr.eqns:
        inner = [called for value in equation.params.values() for called in _jaxprs_in(value)]
        passed = equation.invars
        if len(inner) == 1 and len(inner[0].invars) == len(passed):
            # An equation that calls a function lists all inputs, also those that it does not read.
            reads = _read_inputs(inner[0])
            passed = [variable for variable, is_read in zip(passed, reads, strict=True) if is_read]
        read |= {variable for variable in passed if isinstance(variable, Var)}
    return [variable in read for variable in jaxpr.invars]


def _jaxprs_in(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _jaxprs_in(element)


class _LookError(BaseException):
    """The optimizer accesses a placeholder. A BaseException, so that the optimizer won't catch it.

    Attributes:
        name: name of the argument.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Placeholder:
    """Placeholder of an argument that JAX can't trace; any access raises `_LookError`."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattribute__(self, attribute: str) -> Never:
        _look(self)


def _look(placeholder: _Placeholder, *_arguments: Any, **_keywords: Any) -> Never:
    raise _LookError(object.__getattribute__(placeholder, "_name"))


# Python finds operators in the class, without `__getattribute__`, so they must be defined.
_NO_OPERATORS: Final = {
    *("__class__", "__class_getitem__", "__doc__", "__getattribute__", "__init__"),
    *("__init_subclass__", "__new__", "__subclasshook__"),
}
_OPERATORS: Final = {
    *("__array__", "__call__", "__enter__", "__exit__", "__matmul__", "__next__", "__rmatmul__"),
    *(name for kind in (complex, dict, int, float, list, str) for name in dir(kind)),
}
for _operator in _OPERATORS - _NO_OPERATORS:
    setattr(_Placeholder, _operator, _look)


def _watched(function: Callable[..., Any], name: str, used: set[str]) -> Callable[..., Any]:
    @functools.wraps(function)  # Optax reads the signature
    def call(*arguments: Any, **keywords: Any) -> Any:
        used.add(name)
        return function(*arguments, **keywords)

    return call


def _kind_of(value: Any) -> Kind:
    leaves = jax.tree.leaves(value)
    if callable(value) and len(leaves) == 1 and leaves[0] is value:  # no module with arrays
        return "function"
    return "arrays" if leaves and all(hasattr(leaf, "dtype") for leaf in leaves) else "other"
