"""Stored form of the fields that a subclass of `EasyDeLState` adds, and the targets to load them.

A checkpoint has their leaves as the item `fields`. Its meta describes their containers, if JSON
can: dicts, lists, tuples, None, and trees of the same structure as `graphstate`, `graphother` or
`opt_state`. Fields with other containers, such as Optax's tuples, need a target to be loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding

from cairn.interop.errors import ArgumentError
from cairn.state.checkpointing.leaf_forms import is_key_dtype
from cairn.state.paths import named_leaves
from cairn.state.sharding.optimizers import optimizer_shardings
from cairn.state.states.added_fields import refuse_unknown
from cairn.state.states.checkpoint import StoredCheckpoint
from cairn.storage.arrays.dtypes import dtype_named
from cairn.storage.errors import TreeMismatchError

__all__ = ["FieldTargets", "field_forms", "field_targets", "static_values"]

FieldTargets = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | Literal["skip"] | None
"""Argument `fields` of `load_state`."""

_ITEM = "fields"
_NUMBERS: Mapping[str, type] = {kind.__name__: kind for kind in (bool, int, float, complex)}
_LIKE = ("graphstate", "graphother", "opt_state")
_SKIP_OR_SAME = "load it with the class it was saved with, or pass fields='skip' to leave them out"


def field_forms(state: Any) -> dict[str, Any]:
    """Return the JSON form of each added field, by name."""
    structures = {name: jax.tree.structure(getattr(state, name)) for name in _LIKE}
    return {name: _form(value, structures) for name, value in state.added_fields.items()}


def field_targets(
    checkpoint: StoredCheckpoint, abstract: Any, fields: FieldTargets
) -> dict[str, Any]:
    """Return the target of each added field that the checkpoint has, or that has a given target.

    Args:
        checkpoint: the checkpoint.
        abstract: the state without arrays, with shardings; its added fields are not used.
        fields: the argument `fields` of the load.

    Raises:
        ArgumentError: a target has no field, or a target is missing that is needed.
        TreeMismatchError: checkpoint and class have different fields; all are listed.
    """
    if isinstance(fields, str):
        if fields == "skip":
            return {}
        raise ArgumentError(
            path="fields", expected="targets by name, or 'skip'", found=repr(fields)
        )
    stored: Mapping[str, Any] = checkpoint.meta.get(_ITEM) or {}
    names = type(abstract).added_field_names()
    targets = {name: target for name, target in _given(abstract, fields).items() if name in names}
    _check_names(checkpoint, type(abstract), stored, names, targets)
    unknown = {name: _unknown(stored[name]) for name in names if name in {*stored} - {*targets}}
    if any(unknown.values()):
        raise ArgumentError(
            path=f"{checkpoint.uri}: fields",
            expected="fields=, a dict of trees by name, or a function that makes it of the state "
            "without arrays: fields=lambda state: {...}",
            found="; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in unknown.items()),
            next_step="give targets for these, or pass fields='skip' to leave all fields out",
        )
    trees = {
        name: targets[name] if name in targets else _built(stored[name], abstract, name)
        for name in names
        if name in targets or name in stored
    }
    placed: dict[str, Any] = _placed(checkpoint, trees, abstract.graphstate)
    return placed


def _form(value: Any, structures: Mapping[str, Any]) -> Any:
    if value is None:
        return None
    structure: Any = jax.tree.structure(value)
    if structure == jax.tree.structure(0):
        return _leaf_form(value)
    for name, other in structures.items():
        if structure == other:
            return {"like": name}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _form(item, structures)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_form(item, structures) for item in value]}
    return {"other": f"{type(value).__module__}.{type(value).__qualname__}"}


def _leaf_form(leaf: Any) -> str:
    if type(leaf).__name__ in _NUMBERS and type(leaf) in _NUMBERS.values():
        return type(leaf).__name__
    if isinstance(leaf, jax.Array) and is_key_dtype(leaf.dtype):
        return f"key {jax.random.key_impl(leaf)}"
    if isinstance(leaf, jax.Array):
        return "weak" if leaf.weak_type else "array"
    return "numpy"


def _unknown(form: Any) -> list[str]:
    """Return the names of those containers in a form that can't be rebuilt from JSON."""
    if not isinstance(form, Mapping):
        return []
    ((kind, content),) = form.items()
    if kind == "other":
        return [str(content)]
    if kind == "like":
        return []
    parts = [part for _, part in content] if kind == "dict" else content
    return [name for part in parts for name in _unknown(part)]


def _built(form: Any, abstract: Any, name: str) -> Any:
    """Return the tree that a form describes, with the names of leaf forms as its leaves."""
    if not isinstance(form, Mapping):
        return form
    ((kind, content),) = form.items()
    if kind == "like":
        like = getattr(abstract, content)
        if like is None:
            raise ArgumentError(
                path=f"fields: {name}",
                expected=f"the state's {content}, which it is formed like",
                found=f"a load that leaves {content} out",
                next_step="load that too, give a target in fields=, or pass fields='skip'",
            )
        return jax.tree.map(_stored_in_place_of, like)
    if kind == "dict":
        return {key: _built(part, abstract, name) for key, part in content}
    parts = [_built(part, abstract, name) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def _stored_in_place_of(leaf: Any) -> Any:
    # The field's dtype may differ from the model's; PRNG keys have the model's.
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_key_dtype(leaf.dtype) else "array"


def _placed(checkpoint: StoredCheckpoint, trees: Any, params: Any) -> Any:
    """Return the targets with shape, dtype and sharding filled in for each leaf that lacks them."""
    stored = checkpoint.leaves(_ITEM)
    leaves = []
    for named in named_leaves(trees):
        record, leaf = stored.get(named.path), named.leaf
        if isinstance(leaf, str):
            leaf = _target(leaf, record)
        leaves.append(leaf)
    structure: Any = jax.tree.structure(trees)
    planned = optimizer_shardings(jax.tree.unflatten(structure, leaves), params)
    places = structure.flatten_up_to(planned)
    return jax.tree.unflatten(
        structure,
        [
            _at(leaf, checkpoint.place(_ITEM, named.path, place))
            for named, leaf, place in zip(named_leaves(trees), leaves, places, strict=True)
        ],
    )


def _target(form: str, record: Any) -> Any:
    if form in _NUMBERS:
        return _NUMBERS[form]()
    shape = () if record is None else tuple(record.shape)
    kind, _, impl = form.partition(" ")
    if kind == "key":
        key: Any = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
        return jax.ShapeDtypeStruct(shape, key.dtype)
    stored = np.float32 if record is None or record.dtype.startswith("key<") else record.dtype
    dtype = dtype_named(stored) if isinstance(stored, str) else np.dtype(stored)
    if kind == "numpy":
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=kind == "weak")


def _at(leaf: Any, place: Any) -> Any:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    own = leaf.sharding
    # If parameters are on a mesh, a single-device sharding does not count.
    if own is not None and (isinstance(own, NamedSharding) or not isinstance(place, NamedSharding)):
        place = own
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=place, weak_type=getattr(leaf, "weak_type", False)
    )


def static_values(abstract: Any, fields: FieldTargets) -> dict[str, Any]:
    """Return the values of static fields, by name, from the argument `fields` of a load.

    Raises:
        ArgumentError: `fields` has names that are no fields.
    """
    if isinstance(fields, str):
        return {}
    static = type(abstract).added_field_names(static=True)
    return {name: value for name, value in _given(abstract, fields).items() if name in static}


def _given(abstract: Any, fields: Any) -> dict[str, Any]:
    targets = fields(abstract) if callable(fields) else fields
    if targets is not None and not isinstance(targets, Mapping):
        raise ArgumentError(
            path="fields", expected="targets by the names of fields", found=type(targets).__name__
        )
    targets = dict(targets or {})
    names_by_kind = (type(abstract).added_field_names(static=static) for static in (False, True))
    refuse_unknown("fields", targets, {name for names in names_by_kind for name in names})
    return targets


def _check_names(
    checkpoint: StoredCheckpoint,
    state_class: type[Any],
    stored: Mapping[str, Any],
    names: list[str],
    targets: Mapping[str, Any],
) -> None:
    paths = checkpoint.leaves(_ITEM)
    full = {path.partition("/")[0] for path in paths} & {*stored}
    problems = [
        f"fields/{name}: stored, and {state_class.__name__} has no such field"
        for name in sorted(full - set(names))
    ]
    defaults = {entry.name: entry for entry in fields(state_class)}
    problems += [
        f"fields/{name}: missing from the checkpoint, and {state_class.__name__} does not leave it "
        "None by default"
        for name in names
        if name not in stored and name not in targets and not _is_empty(defaults[name])
    ]
    if problems:
        raise TreeMismatchError(
            "the checkpoint has other fields",
            path=checkpoint.uri,
            expected=f"the fields that {state_class.__name__} adds: {', '.join(names) or 'none'}",
            found=f"{', '.join(sorted(stored)) or 'none'}",
            next_step=_SKIP_OR_SAME,
            problems=sorted(problems),
        )


def _is_empty(entry: Any) -> bool:
    """Return whether a field has a default without leaves, which a load can use."""
    if entry.default_factory is not MISSING:
        return not jax.tree.leaves(entry.default_factory())
    return entry.default is not MISSING and not jax.tree.leaves(entry.default)
