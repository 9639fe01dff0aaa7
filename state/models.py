"""Models without their arrays: building one abstractly, and the settings it was built with."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

__all__ = ["abstract_model", "module_settings"]


def module_settings(model: Any) -> dict[str, str | None]:
    """Returns the settings of a module's constructor as JSON: dtype, param_dtype, precision."""
    settings: dict[str, str | None] = {}
    for name in ("dtype", "param_dtype"):
        value = getattr(model, name, None)
        settings[name] = None if value is None else np.dtype(value).name
    precision = getattr(model, "precision", None)
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    settings["precision"] = None if precision is None else str(precision)
    return settings


def abstract_model(model_class: type[Any], config: Any, settings: Mapping[str, Any]) -> Any:
    """Builds a model of which every array is only a shape; nothing is computed.

    Args:
        model_class: class of the module.
        config: its configuration.
        settings: `dtype`, `param_dtype` and `precision`; None leaves the class's default.
    """
    given = {
        name: np.dtype(value) if name != "precision" else value
        for name, value in settings.items()
        if value is not None
    }
    return nnx.eval_shape(lambda: model_class(config=config, rngs=nnx.Rngs(0), **given))
