"""Description of a state for a save: its leaves by path, and the JSON that rebuilds its model.

Most of it follows from the static part of a state, which stays the same object from step to step.
So the first save computes it and later ones reuse it: merging a model takes longer than copying its
arrays.
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
"""Maximum number of cached descriptions, for jobs that save states of different structures."""


class ModelDescription(NamedTuple):
    """Description of a state's model.

    Attributes:
        model_class: class of the model.
        config: the model's config; None if it has none.
        meta: JSON from which a load builds the model, with the paths of the trained variables.
    """

    model_class: type[Any]
    config: Any
    meta: Mapping[str, Any]


class DescribedState(NamedTuple):
    """State as a save needs it.

    Attributes:
        description: description of the model.
        leaves: all arrays and numbers, in JAX's order.
        items: the leaves, by item and path; None if that is only known after traversing the trees.
    """

    description: ModelDescription
    leaves: list[Any]
    items: FlatTrees | None


class _Kept(NamedTuple):
    """Cached parts of a description that do not depend on the values of leaves.

    Attributes:
        graphdef: the state's graphdef; the reference prevents that another object gets its id.
        structure: tree structure of the state's parts.
        description: description of the model.
        values: all values in the config, to detect changes.
        places: index of each leaf, by item and path; None if the trees must be traversed.
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
        # Not `state.model`: the user may have changed that module, but not the state.
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
    # Some NNX modules are leaves to JAX, although they contain variables.
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
    """Return the index of each leaf, by item and path; None if the trees must be traversed."""
    try:
        numbers = items_of(*jax.tree.unflatten(structure, range(structure.num_leaves)))
        opened = open_modules(numbers).trees
        if any(opened[item] is not tree for item, tree in numbers.items()):
            return None  # which leaves of a module are stored depends on their types
        return TreePlan().flatten(numbers)
    except Exception:  # a custom node refuses numbers as leaves, or the save will refuse keys
        return None


def _is_still(kept: _Kept, structure: Any) -> bool:
    """Return whether a cached description is still valid: structure and config are the same."""
    config = kept.description.config
    try:
        alike = bool(structure == kept.structure)
    except Exception:  # raised by a comparison of the metadata of Variables
        return False
    values = [*_values(config)]
    if len(values) == len(kept.values) and all(map(operator.is_, values, kept.values)):
        return alike
    # Compared as text: True and 1 are equal, but not as JSON.
    return alike and repr(config.to_dict()) == repr(kept.description.meta["config"])


def _values(value: Any) -> Iterator[Any]:
    """Yield every value in a config; for one of unknown type, a new object equal to no other."""
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
    """Return the paths of the trained variables; None if they are those of `trainable_filter`."""
    usual = nnx.filter_state(
        nnx.merge_state(graphstate, graphother), getattr(model, "trainable_filter", nnx.Param)
    )
    own = variable_paths(graphstate)
    return None if own == variable_paths(usual) else own
