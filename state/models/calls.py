"""ModuleCallMixin: a module's forward pass under `jax.jit`, `jax.grad` and other transforms."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.errors import ArgumentError
from cairn.state.models.loss import LossConfig
from cairn.state.paths import rebuild

__all__ = ["ModuleCallMixin", "static_arguments"]

_STATIC = (bool, int, str, bytes, type, enum.Enum, np.dtype, LossConfig, EDPretrainedConfig)
_STATIC_NAMES = {"bool", "int", "str", "bytes", "LossConfig", "Callable"}


class ModuleCallMixin:
    """Static arguments and pure form of a forward pass, for functions under jit."""

    def get_static_arguments(self) -> tuple[str, ...]:
        """Return the names of the forward pass's arguments that must be static under jit.

        They follow from its signature; see `static_arguments`. A function that takes the forward
        pass's arguments by name needs them as `static_argnames` of `jax.jit`.
        """
        return static_arguments(type(self).__call__)

    def prepare_inputs_for_call(self, **inputs: Any) -> dict[str, Any]:
        """Return the inputs without those that are None, with static ones as Python values.

        Raises:
            ArgumentError: a static argument is a traced array, or can't be hashed.
        """
        static = self.get_static_arguments()
        return {
            name: _plain(name, value) if name in static else value
            for name, value in inputs.items()
            if value is not None
        }

    def pure_transform_fn(self, **static: Any) -> Callable[[Any, Mapping[str, Any]], Any]:
        """Return `fn(params, inputs)`: the forward pass without side effects, for jit and grad.

        `params` has the form of the module's `params` or `split_params()`; `inputs` are arguments
        of the forward pass by name. The rest of the module (random streams, running averages) is
        copied now. Each call of `fn` starts from this copy and drops its changes, so dropout uses
        the same random numbers in every call. The module itself never changes.

        Args:
            static: static arguments of every call, since jit would trace them among `inputs`.

        Raises:
            ArgumentError: one of `static` is no static argument of the forward pass.
            TreeStructureError: raised by `fn` if the paths or shapes of `params` are not those of
                the module's; lists all differences.
        """
        unknown = sorted(set(static) - set(self.get_static_arguments()))
        if unknown:
            raise ArgumentError(
                path="pure_transform_fn",
                expected=f"static arguments among {self.get_static_arguments()}",
                found=", ".join(unknown),
                next_step="pass the others among the inputs of the function",
            )
        graphdef, params, other = nnx.split(self, nnx.Param, ...)
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        # Copies: a training step may donate the module's own arrays.
        other = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, other)

        def transform(params: Any, inputs: Mapping[str, Any]) -> Any:
            state = rebuild(own, params, path="params")
            module = nnx.merge(graphdef, state, other, copy=True)
            return module(**module.prepare_inputs_for_call(**{**static, **inputs}))

        return transform


def static_arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters that must be static under jit.

    A parameter is static if its annotation is bool, int, str, bytes, an enum, a dtype, a class, a
    callable, a `LossConfig`, a model config, or a union of these and None. If it has no annotation,
    the type of its default value decides in the same way, except that int is not static then.
    """
    parameters = inspect.signature(forward).parameters.values()
    try:
        hints = typing.get_type_hints(inspect.unwrap(forward))
    except (NameError, TypeError):  # names that only type checkers import
        hints = {}
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return tuple(p.name for p in named if _is_static(p, hints.get(p.name, p.annotation)))


def _is_static(parameter: inspect.Parameter, annotation: Any) -> bool:
    if annotation not in (inspect.Parameter.empty, Any, "Any"):
        return _is_static_type(annotation)
    value = parameter.default
    if value is inspect.Parameter.empty or value is None:
        return False
    return isinstance(value, bool | str | enum.Enum | np.dtype | LossConfig) or callable(value)


def _is_static_type(annotation: Any) -> bool:
    if isinstance(annotation, str):
        names = {name.strip().split("[")[0] for name in annotation.split("|")} - {"None"}
        return bool(names) and names <= _STATIC_NAMES
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return bool(members) and all(_is_static_type(member) for member in members)
    if origin in (typing.Literal, Callable, type) or annotation is Callable:
        return True
    kind = annotation if origin is None else origin
    return isinstance(kind, type) and issubclass(kind, _STATIC)


def _plain(name: str, value: Any) -> Any:
    next_step = (
        "pass it through jit's static_argnames, or bind it with pure_transform_fn(name=value)"
    )
    if isinstance(value, jax.core.Tracer):
        raise ArgumentError(
            path=name,
            expected="a plain value: this argument is static",
            found=f"an array under trace, {value.aval}",
            next_step=next_step,
        )
    if isinstance(value, jax.Array | np.ndarray | np.generic) and value.ndim == 0:
        return value.item()
    try:
        hash(value)
    except TypeError as exc:
        raise ArgumentError(
            path=name,
            expected="a value that can be hashed: this argument is static",
            found=type(value).__name__,
        ) from exc
    return value
