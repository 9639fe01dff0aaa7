"""Fields that a subclass adds to a state: their names, and the check of their values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from cairn.interop.errors import ArgumentError

__all__ = ["added_fields", "added_names", "check_added", "refuse_unknown"]


def added_names(state_class: type[Any], base: type[Any], *, static: bool = False) -> list[str]:
    """Return the names of the fields that a class adds to `base`.

    Args:
        state_class: a subclass of `base`.
        base: a state class of Cairn.
        static: False for the fields that are part of the pytree, True for the others.
    """
    return [
        field.name
        for field in _added(state_class, base)
        if field.metadata.get("pytree_node", True) != static
    ]


def added_fields(state: Any, base: type[Any]) -> dict[str, Any]:
    """Return the values of the fields that a state's class adds to `base`, by name."""
    return {name: getattr(state, name) for name in added_names(type(state), base)}


def check_added(
    state_class: type[Any], base: type[Any], values: Mapping[str, Any], *, path: str = "create"
) -> None:
    """Check the values of added fields, including static ones, with which a state is made.

    Args:
        state_class: a subclass of `base`.
        base: a state class of Cairn.
        values: the values, by name of the field.
        path: name of the method that makes the state, for the error.

    Raises:
        ArgumentError: if a field is unknown, or fields without default have no value; names all.
    """
    path = f"{state_class.__name__}.{path}"
    added = {field.name: field for field in _added(state_class, base)}
    refuse_unknown(path, values, set(added))
    missing = [
        name
        for name, field in added.items()
        if name not in values
        and field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ArgumentError(
            path=path,
            expected="a value for each field without default",
            found=f"none for {', '.join(missing)}",
        )


def refuse_unknown(path: str, values: Mapping[str, Any], names: set[str]) -> None:
    """Check that all keys of `values` are names of fields.

    Args:
        path: name of the caller's method, for the error.
        values: values by name.
        names: names of the fields.

    Raises:
        ArgumentError: if some are not; lists these, and the names of the fields.
    """
    unknown = sorted(set(values) - names)
    if unknown:
        raise ArgumentError(
            path=path,
            expected=f"fields among {', '.join(sorted(names)) or 'none of its own'}",
            found=", ".join(unknown),
        )


def _added(state_class: type[Any], base: type[Any]) -> list[dataclasses.Field[Any]]:
    own = {field.name for field in dataclasses.fields(base)}
    return [field for field in dataclasses.fields(state_class) if field.name not in own]
