"""NNX forms of Linen models, by which they are saved, loaded, trained and exported.

`make_twin` makes a class for each subclass of `EDPretrainedModel` and registers it under the same
name, so that a load finds it. Its modules have the parameters, under the paths that Linen gives
them, and call the Linen model with them.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from cairn.interop.errors import ArgumentError, ConfigError
from cairn.state.models.base import EasyDeLBaseModule

__all__ = ["LinenTwin", "linen_model", "make_twin"]


class LinenTwin:
    """Mixin that makes an `EasyDeLBaseModule` the NNX form of a Linen model.

    Attributes:
        linen_class: class of the Linen model, which must accept the call
            `linen_class(config, dtype=..., _do_init=False)`.
    """

    linen_class: ClassVar[Any]

    def __init__(
        self: Any,
        config: Any,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Make new parameters, the floating ones of `param_dtype`.

        Raises:
            ConfigError: if a parameter has the name of an attribute of the module, or the Linen
                module needs variables that are no parameters, which would not be saved.
            ArgumentError: if a precision is given: the Linen module decides its precision.
        """
        if precision is not None:
            raise ArgumentError(
                path=f"{type(self).__name__}: precision",
                expected="None: the Linen module says how it multiplies",
                found=repr(precision),
                next_step="make it a field of the config that the module looks at",
            )
        EasyDeLBaseModule.__init__(self, config, dtype, param_dtype, precision, rngs)
        model = linen_model(self.linen_class, config, self.dtype)
        lost = model.needed_collections()
        if lost:
            raise ConfigError(
                path=f"{type(self).__name__}: the Linen module's variables",
                expected="parameters alone, which are what is trained, saved and loaded",
                found="; ".join(f"{name}: {', '.join(paths)}" for name, paths in lost.items()),
                next_step="use layers without them (LayerNorm for BatchNorm), or keep them beside "
                "the parameters in a TrainState with a field for each collection",
            )
        key = (nnx.Rngs(0) if rngs is None else rngs).params()
        params = jax.tree.map(self._cast, model.init_weights(key))
        taken = sorted(name for name in params if hasattr(type(self), name) or name in vars(self))
        if taken:
            raise ConfigError(
                path=f"{type(self).__name__}: the Linen module's parameters",
                expected="names that a module has no other use for",
                found=", ".join(taken),
                next_step="give these submodules or parameters other names",
            )
        for name, node in _as_variables(params, model.params_with_axes()).items():
            setattr(self, name, node)

    def _cast(self: Any, leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(self.param_dtype) if floating else leaf


def make_twin(linen_class: type[Any]) -> type[EasyDeLBaseModule]:
    """Return the class that is the NNX form of a Linen model's class."""

    def forward(self: Any, *arguments: Any, **inputs: Any) -> Any:
        model = linen_model(self.linen_class, self.config, self.dtype)
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        return model(*arguments, params=params, **inputs)

    signature = inspect.signature(linen_class.__call__)
    kept = [entry for name, entry in signature.parameters.items() if name != "params"]
    forward.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    namespace = {
        "__call__": forward,
        "__doc__": f"{linen_class.__name__} as an NNX module.",
        "__module__": linen_class.__module__,
        "__qualname__": linen_class.__qualname__,
        "linen_class": linen_class,
    }
    twin: type[EasyDeLBaseModule] = types.new_class(
        linen_class.__name__,
        (LinenTwin, EasyDeLBaseModule),
        exec_body=lambda body: body.update(namespace),
    )
    return twin


@functools.lru_cache(maxsize=64)
def linen_model(linen_class: Any, config: Any, dtype: Any) -> Any:
    """Return the Linen model of a config, without parameters.

    Raises:
        ConfigError: if the class has further arguments without defaults.
    """
    try:
        inspect.signature(linen_class).bind(config, dtype=dtype, _do_init=False)
    except TypeError as exc:
        raise ConfigError(
            path=f"{linen_class.__name__}.__init__",
            expected=f"what can be made as {linen_class.__name__}(config, dtype=..., "
            "_do_init=False)",
            found=str(exc),
            next_step="give its other parameters defaults, or take their values from the config",
        ) from exc
    return linen_class(config, dtype=dtype, _do_init=False)


def _as_variables(tree: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts of arrays as NNX nodes.

    Args:
        tree: the arrays.
        axes: tree of the same structure, with `nnx.Param`s for leaves that have axis names.
    """
    nodes: dict[str, Any] = {}
    for name, value in tree.items():
        named = axes[name]
        if isinstance(value, Mapping):
            nodes[name] = nnx.Dict(_as_variables(value, named))
        elif isinstance(named, nnx.Variable):
            nodes[name] = nnx.Param(value, axes=named.get_metadata()["axes"])
        else:
            nodes[name] = nnx.Param(value)
    return nodes
