"""Whether `load_state` could rebuild what is about to be saved: asked once, before the first save.

What it could not is refused while there is nothing to lose; else the first restart would find out.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from flax import nnx

from cairn.state.adapt import abstract_model
from cairn.state.config import AutoEasyDeLConfig
from cairn.state.errors import ConfigError
from cairn.state.paths import tree_problems

__all__ = ["refuse_unloadable"]

logger = logging.getLogger("cairn.save")

_SHOWN: Final = 5
_CHECKED: WeakKeyDictionary[type[Any], set[str]] = WeakKeyDictionary()
"""What was found loadable: model class -> the config and settings that it was built with."""


def refuse_unloadable(model_class: type[Any], meta: Mapping[str, Any], tree: Any) -> None:
    """Raise if `load_state` would always refuse a checkpoint with this meta.

    The model is built from it without arrays, as a load does; of each class, config and settings
    once in a process. A module without a config is for a TrainState to load. A model may have other
    leaves than its config gives it: then the log says that a load needs more than the checkpoint.

    Args:
        model_class: class of the model.
        meta: what is stored of it.
        tree: its variables.

    Raises:
        ConfigError: the model can't be built from what is stored.
    """
    config, settings = meta["config"], meta["module"]
    if config is None:
        return
    checked = _CHECKED.setdefault(model_class, set())
    key = json.dumps([config, settings], sort_keys=True, default=str)
    if key in checked:
        return
    try:
        described = abstract_model(model_class, AutoEasyDeLConfig.from_dict(config), settings)
    except Exception as exc:  # of the model's own constructor, whatever it raises
        raise ConfigError(
            "load_state could not load this checkpoint",
            path=f"save_state: {model_class.__name__}",
            expected="a model that can be built from the config, dtypes and adapters it is stored "
            "with",
            found=f"{type(exc).__name__}: {exc}",
            next_step="set the model_type of the config's own class, and let the model's "
            "__init__ take config, dtype, param_dtype, precision and rngs alone",
        ) from exc
    checked.add(key)
    problems = tree_problems(nnx.state(described), tree)
    if problems:
        more = f" and {len(problems) - _SHOWN} more" * (len(problems) > _SHOWN)
        logger.warning(
            "the model is not what its config builds: load_state will need config_kwargs= or "
            "model_class= (%s%s)",
            "; ".join(problems[:_SHOWN]),
            more,
        )
