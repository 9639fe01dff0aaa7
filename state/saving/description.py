"""The description of a model in a checkpoint: enough to build it again, without its arrays.

Most of it follows from the static part of a state, which is one object over the steps of a job: it
is worked out at the first save, since to merge a model takes longer than to hold its arrays.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax
from flax import nnx

from cairn.state.adapt import module_settings
from cairn.state.paths import variable_paths
from cairn.state.registry import class_identity

__all__ = ["ModelDescription", "describe"]

_MOST_KEPT: Final = 8
"""States of different structure that one job saves by turns."""


class ModelDescription(NamedTuple):
    """The description of a state's model.

    Attributes:
        model_class: its class.
        config: its config, None if it has none.
        meta: JSON that a load builds it from, and the paths of what is trained.
    """

    model_class: type[Any]
    config: Any
    meta: Mapping[str, Any]


class _Kept(NamedTuple):
    """A description, and the parts of the state that it follows from."""

    graphdef: Any
    structure: Any
    description: ModelDescription


_kept: dict[int, _Kept] = {}
"""By the id of the graphdef, which is held so that no other gets it."""


def describe(state: Any) -> ModelDescription:
    """The description of the model of an `EasyDeLState`.

    Raises:
        ConfigError: the config has fields that JSON can't hold.
    """
    structure = jax.tree.structure((state.graphstate, state.graphother))
    kept = _kept.get(id(state.graphdef))
    if kept is not None and _is_still(kept, structure):
        return kept.description
    # Not `state.model`: what its user did to that module is not in the state.
    model = state.merge(state.graphstate)
    config = getattr(model, "config", None)
    meta = {
        **class_identity(type(model)),
        "model_type": getattr(config, "model_type", None),
        "config": None if config is None else config.to_dict(),
        "module": module_settings(model),
        "trainable": _unusual_split(model, state.graphstate, state.graphother),
    }
    description = ModelDescription(type(model), config, meta)
    _kept.pop(id(state.graphdef), None)
    _kept[id(state.graphdef)] = _Kept(state.graphdef, structure, description)
    for oldest in list(_kept)[:-_MOST_KEPT]:
        _kept.pop(oldest, None)
    return description


def _is_still(kept: _Kept, structure: Any) -> bool:
    """Tell whether a state of the same graphdef is described so: its config may have changed."""
    config = kept.description.config
    try:
        alike = bool(structure == kept.structure)
    except Exception:  # of what somebody's Variables have beside their values
        return False
    # As text: True and 1 are equal, and not the same JSON.
    return alike and (
        config is None or repr(config.to_dict()) == repr(kept.description.meta["config"])
    )


def _unusual_split(model: Any, graphstate: Any, graphother: Any) -> list[str] | None:
    """The paths of what is trained, unless a model of this class would be split so itself."""
    usual = nnx.filter_state(
        nnx.merge_state(graphstate, graphother), getattr(model, "trainable_filter", nnx.Param)
    )
    own = variable_paths(graphstate)
    return None if own == variable_paths(usual) else own
