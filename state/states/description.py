"""Description of a state for a save: its leaves by path, and what it takes to rebuild its model.

Most of it follows from the static part of a state, which stays one object over the steps of a job.
The first save computes and caches it, since merging a model takes longer than copying its arrays.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import jax
from flax import nnx

from cairn.interop.config.frozen import FrozenJSON
from cairn.state.adapters.models import module_settings
from cairn.state.checkpointing.modules import FlatTrees, TreePlan, open_modules
from cairn.state.model_classes import class_identity
from cairn.state.paths import variable_paths

__all__ = ["DescribedState", "ModelDescription", "describe", "items_of"]

_MOST_KEPT: Final = 8
"""States of different structure that a job may save in turn."""


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


class DescribedState(NamedTuple):
    """A state as a save needs it.

    Attributes:
        description: of its model.
        leaves: arrays and numbers, as JAX lists them.
        items: the leaves by item and path; None where the trees must be walked to tell.
    """

    description: ModelDescription
    leaves: list[Any]
    items: FlatTrees | None


class _Kept(NamedTuple):
    """Cached parts of a description that do not depend on the values of leaves.

    Attributes:
        graphdef: kept alive, so that no other object gets its id.
        structure: of the parts.
        description: of the model.
        values: every value in the config, to notice a changed one.
        places: index of the leaf, by item and path; None where the trees must be walked.
    """

    graphdef: Any
    structure: Any
    description: ModelDescription
    values: list[Any]
    places: dict[str, dict[str, int]] | None


_kept: dict[tuple[int, bool], _Kept] = {}
"""Descriptions by the id of the graphdef and whether the optimizer's state is saved."""


def describe(state: Any, *, optimizer: bool) -> DescribedState:
    """Describe an `EasyDeLState` for a save.

    Args:
        state: the state.
        optimizer: whether the optimizer's state is among its items.

    Raises:
        ConfigError: the config has fields that JSON can't hold.
    """
    parts = (
        state.graphstate,
        state.graphother,
        state.opt_state if optimizer else None,
        state.added_fields,
    )
    leaves, structure = jax.tree.flatten(parts)
    key = id(state.graphdef), optimizer
    kept = _kept.get(key)
    if kept is None or not _is_still(kept, structure):
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
        _kept.pop(key, None)
        values = [*_values(config)]
        kept = _kept[key] = _Kept(
            state.graphdef, structure, description, values, _places(structure)
        )
        for oldest in list(_kept)[:-_MOST_KEPT]:
            _kept.pop(oldest, None)
    # Some modules of NNX are leaves to JAX, and hold others.
    if kept.places is None or any(issubclass(kind, nnx.Module) for kind in {*map(type, leaves)}):
        return DescribedState(kept.description, leaves, None)
    items = {
        item: {path: leaves[place] for path, place in places.items()}
        for item, places in kept.places.items()
    }
    return DescribedState(kept.description, leaves, FlatTrees(items))


def items_of(graphstate: Any, graphother: Any, opt_state: Any, added_fields: Any) -> dict[str, Any]:
    """Return the trees that a state is saved as, by item name."""
    items = {"model": nnx.merge_state(graphstate, graphother)}
    if opt_state is not None:
        items["optimizer"] = opt_state
    if jax.tree.leaves(added_fields):
        items["fields"] = added_fields
    return items


def _places(structure: Any) -> dict[str, dict[str, int]] | None:
    """Return the leaf index of each path, by item; None if only a walk of the trees can tell."""
    try:
        numbers = items_of(*jax.tree.unflatten(structure, range(structure.num_leaves)))
        opened = open_modules(numbers).trees
        if any(opened[item] is not tree for item, tree in numbers.items()):
            return None  # which leaves of a module are stored depends on what they are
        return TreePlan().flatten(numbers)
    except Exception:  # somebody's node takes no number; or keys that the save will refuse
        return None


def _is_still(kept: _Kept, structure: Any) -> bool:
    """Return whether the cached description still holds; the config may have changed meanwhile."""
    config = kept.description.config
    try:
        alike = bool(structure == kept.structure)
    except Exception:  # of what somebody's Variables have beside their values
        return False
    values = [*_values(config)]
    if len(values) == len(kept.values) and all(map(operator.is_, values, kept.values)):
        return alike
    # As text: True and 1 are equal, and not the same JSON.
    return alike and repr(config.to_dict()) == repr(kept.description.meta["config"])


def _values(value: Any) -> Iterator[Any]:
    """Yield every value in a config. A value of unknown type yields a new object, equal to none."""
    if value is None or isinstance(value, str | bytes | int | float | FrozenJSON):
        yield value
    elif isinstance(value, tuple | list | dict):
        yield len(value)
        for child in value.items() if isinstance(value, dict) else value:
            yield from _values(child)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for child in vars(value).values():
            yield from _values(child)
    else:
        yield object()


def _unusual_split(model: Any, graphstate: Any, graphother: Any) -> list[str] | None:
    """Return the paths of the trained variables; None if the model class would choose the same."""
    usual = nnx.filter_state(
        nnx.merge_state(graphstate, graphother), getattr(model, "trainable_filter", nnx.Param)
    )
    own = variable_paths(graphstate)
    return None if own == variable_paths(usual) else own
