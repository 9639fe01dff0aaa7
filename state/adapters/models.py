"""Settings that rebuild a module, and models built from them: with arrays, or abstract."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from cairn.state.adapters.lora import LoraSettings
from cairn.state.adapters.quantization import QuantizationSettings

__all__ = ["abstract_model", "build_abstract", "build_model", "module_settings"]

Model = TypeVar("Model", bound=nnx.Module)

_CONSTRUCTOR = ("dtype", "param_dtype", "precision")


def module_settings(model: Any) -> dict[str, Any]:
    """Return the settings that rebuild a module, as JSON.

    The keys are the constructor's `dtype`, `param_dtype` and `precision`, and `quantization` and
    `lora`, which were applied later. Each value is None if it was not set.
    """
    settings: dict[str, Any] = {}
    for name in ("dtype", "param_dtype"):
        value = getattr(model, name, None)
        settings[name] = None if value is None else np.dtype(value).name
    precision = getattr(model, "precision", None)
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    settings["precision"] = None if precision is None else str(precision)
    for name in ("quantization", "lora"):
        adapted = getattr(model, name, None)
        settings[name] = None if adapted is None else adapted.to_dict()
    return settings


def abstract_model(model_class: type[Any], config: Any, settings: Mapping[str, Any]) -> Any:
    """Build a model whose arrays are only shapes and dtypes; nothing is computed.

    Args:
        model_class: class of the module.
        config: configuration of the model.
        settings: the result of `module_settings`. `dtype`, `param_dtype` and `precision` go to the
            constructor unless they are None; `quantization`, then `lora`, are applied unless they
            are missing or None.

    Raises:
        ArgumentError: if quantization or adapters don't fit the model.
    """
    return build_abstract(lambda rngs: build_model(model_class, config, settings, rngs))


def build_abstract(make: Callable[[nnx.Rngs], Model]) -> Model:
    """Return the model that a function makes, whose arrays are only shapes and dtypes.

    Args:
        make: makes the model, with initial weights from its argument. It is called twice if the
            model keeps random streams.
    """

    def make_from_one_key() -> Model:
        rngs = nnx.Rngs()
        rngs.default = _OneKey(0, tag="default")
        return make(rngs)

    model: Model = nnx.eval_shape(make_from_one_key)
    if jax.tree.leaves(nnx.state(model, nnx.RngState)):
        model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))  # the streams it keeps are Flax's own
    return model


class _OneKey(nnx.RngStream):
    """Stream that returns the same key each time, for weights of which only shapes are computed.

    A plain stream counts its keys. When a traced count is set, Flax asks it for its sharding, and
    JAX visits all operations traced so far: the time is quadratic in the number of layers, 2.3 of
    2.8 s for 80.
    """

    def __call__(self) -> jax.Array:
        key: jax.Array = self.key[...]
        return key


def build_model(
    model_class: type[Any], config: Any, settings: Mapping[str, Any], rngs: nnx.Rngs
) -> Any:
    """Build a model with new random weights; the arguments are those of `abstract_model`.

    Raises:
        ArgumentError: if quantization or adapters don't fit the model.
    """
    options = {
        name: np.dtype(settings[name]) if name != "precision" else settings[name]
        for name in _CONSTRUCTOR
        if settings.get(name) is not None
    }
    model = model_class(config=config, rngs=rngs, **options)
    if settings.get("quantization"):
        quantization = QuantizationSettings.from_dict(settings["quantization"])
        model.quantize(quantization.method, quantization.group_size, quantization.pattern)
    if settings.get("lora"):
        lora = LoraSettings.from_dict(settings["lora"])
        model.apply_lora_to_layers(lora.rank, lora.alpha, lora.pattern, lora_dtype=lora.dtype)
    return model
