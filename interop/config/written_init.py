"""Config classes that write their own `__init__`: its parameters become dataclass fields.

Equality, hash, JSON and `replace`, which work on a config's fields, then cover them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from cairn.interop.config.frozen import FrozenJSON
from cairn.interop.errors import ConfigError

__all__ = [
    "Sealed",
    "adopt_init",
    "has_written_init",
    "json_text",
    "refuse_changed",
    "written_parent",
]

_UNDER_WAY = "_init_is_under_way"


class Sealed:
    """Base class whose attributes can be assigned only by an `__init__` that is written by hand."""

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_after_init(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_after_init(name)
        object.__delattr__(self, name)

    def _refuse_after_init(self, name: str) -> None:
        if _UNDER_WAY in vars(self):
            return
        whole: Any = self
        is_field = name in {field.name for field in dataclasses.fields(whole)}
        mend = (
            f"make another one with replace({name}=...)"
            if is_field
            else f"make {name!r} a field: of a dataclass, or a parameter of __init__"
        )
        raise dataclasses.FrozenInstanceError(
            f"{type(self).__name__}.{name}: expected no assignment to a config, which is hashed "
            f"and saved as it was made; {mend}"
        )


def has_written_init(config_class: type[Any]) -> bool:
    """Return whether instances of a class are made by an `__init__` that is written by hand."""
    return hasattr(config_class.__init__, "parameters_are_fields")


def written_parent(config_class: type[Any]) -> type[Any] | None:
    """Return the parent whose written `__init__` a dataclass's generated one replaces, or None."""
    own = [parent for parent in config_class.__mro__ if "__init__" in vars(parent)]
    generated = next(k for k, parent in enumerate(own) if not has_written_init(parent))
    return next((parent for parent in own[generated:] if has_written_init(parent)), None)


def adopt_init(cls: type[Any], base: type[Any]) -> None:
    """Turn the parameters of a class's written `__init__` into dataclass fields.

    Args:
        cls: a subclass of `base`, whose definition has just run.
        base: the base class of all configs.

    Raises:
        ConfigError: an instance could not be created again from its fields; the message says what
            to change.
    """
    written = cls.__dict__["__init__"]
    _, *parameters = inspect.signature(written).parameters.values()
    named = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    inherited = {field.name for field in dataclasses.fields(cls)}
    _check_parameters(cls, parameters, inherited, {*dir(base)} - inherited)
    for name, parameter in named.items():
        if parameter.default is not parameter.empty:
            setattr(cls, name, _frozen(parameter.default, f"{cls.__name__}.__init__: {name}"))
    hints = inspect.get_annotations(cls)
    cls.__annotations__ = {
        **{name: hint for name, hint in hints.items() if name == "model_type"},
        **dict.fromkeys(named, Any),
    }
    dataclasses.dataclass(frozen=True, kw_only=True, init=False)(cls)
    cls.__annotations__ = {**hints, **cls.__annotations__}
    for name in ("__setattr__", "__delattr__"):
        # A frozen dataclass's methods refuse assignments in `__init__`; those of `Sealed` don't.
        delattr(cls, name)
    cls.__init__ = _finishing(written, frozenset(named))


def refuse_changed(
    config: Any, make: Callable[[], Any], excluded: frozenset[str] = frozenset()
) -> None:
    """Raise ConfigError if a config that is created again from its own fields differs.

    Args:
        config: the config.
        make: creates the config again.
        excluded: fields that may differ.

    Raises:
        ConfigError: creating it failed, or some fields differ; all of them are listed.
    """
    written = has_written_init(type(config))
    try:
        again = make()
    except TypeError as exc:
        raise ConfigError(
            path=f"{type(config).__name__}.__init__",
            expected="a call with each of the config's fields",
            found=str(exc),
            next_step="make what it hands to super().__init__ by name a parameter of its own"
            if written
            else "let it be made of its fields alone",
        ) from exc
    lost = [
        f"{field.name}={before!r} would come back as {after!r}"
        for field in dataclasses.fields(config)
        if field.name not in excluded
        for before, after in [(getattr(config, field.name), getattr(again, field.name))]
        if not _is_same(before, after)
    ]
    if not written:
        fields = {field.name for field in dataclasses.fields(config)}
        _, *parameters = inspect.signature(type(config).__init__).parameters
        lost += [  # `InitVar`s are such parameters
            f"{name}, which is no field, would be lost" for name in parameters if name not in fields
        ]
    if lost:
        raise ConfigError(
            path=type(config).__name__,
            expected="a class that gives the same attributes when it is called with them",
            found="; ".join(lost),
            next_step="keep each argument under its own name, and give what is computed from it "
            "another; nested objects and enums are made again in _from_json",
        )


def json_text(config: Any, data: Mapping[str, Any]) -> str:
    """Return a config's fields as JSON.

    Raises:
        ConfigError: JSON can't hold some fields; all of them are listed.
    """
    problems = []
    for name, value in data.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as exc:
            problems.append(f"{name}={getattr(config, name)!r}: {exc}")
    if problems:
        raise ConfigError(
            path=type(config).__name__,
            expected="fields that JSON can hold: text, numbers, booleans, lists and mappings",
            found="; ".join(problems),
            next_step="make them text or numbers, and the objects that they stand for in a "
            "property",
        )
    return json.dumps(data)


def _is_same(before: Any, after: Any) -> bool:
    """Return whether values and types are equal; a list and a tuple of equal items are the same."""
    if isinstance(before, enum.Enum) or hasattr(before, "_fields"):
        # Such values equal plain text, numbers and tuples, but lack their identity or attributes.
        return type(before) is type(after) and bool(before == after)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        same_keys = before.keys() == after.keys()
        return same_keys and all(_is_same(before[key], after[key]) for key in before)
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        pairs = zip(before, after, strict=False)
        return len(before) == len(after) and all(_is_same(*pair) for pair in pairs)
    # NaN != NaN, but it is the same setting.
    return before is after or bool(before == after) or (before != before and after != after)


def _check_parameters(
    cls: type[Any], parameters: list[inspect.Parameter], inherited: set[str], taken: set[str]
) -> None:
    names = {parameter.name for parameter in parameters}
    problems = [
        f"{parameter.name!r} can't be given by name"
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
    ]
    problems += [
        f"{name!r} is a method or property of every config" for name in sorted(names & taken)
    ]
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_more and inherited - names:
        problems.append("no **kwargs for the fields of its parents")
    if problems:
        raise ConfigError(
            path=f"{cls.__name__}.__init__",
            expected="parameters with names of their own, and **kwargs that go on to "
            "super().__init__(**kwargs)",
            found="; ".join(problems),
            next_step="change them, or make the class a @dataclass(frozen=True, kw_only=True)",
        )


def _finishing(written: Callable[..., None], named: frozenset[str]) -> Callable[..., None]:
    """Return an `__init__` that calls the written one, then checks and freezes the fields."""

    @functools.wraps(written)
    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        if type(self).__init__ is not init:
            written(self, *arguments, **keywords)
            return
        object.__setattr__(self, _UNDER_WAY, True)
        written(self, *arguments, **keywords)
        _finish(self, {name: value for name, value in keywords.items() if name not in named})
        object.__delattr__(self, _UNDER_WAY)
        self.raise_for_problems()

    init.parameters_are_fields = True  # type: ignore[attr-defined]  # read by `has_written_init`
    return init


def _finish(config: Any, handed_on: Mapping[str, Any]) -> None:
    cls = type(config)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if "model_type" not in handed_on and _declares_model_type(cls):
        object.__setattr__(config, "model_type", cls.model_type)
    absent = [repr(name) for name in fields if name not in vars(config)]
    if absent:
        raise ConfigError(
            path=f"{cls.__name__}.__init__",
            expected="every parameter kept under its own name, and a call of "
            "super().__init__(**kwargs)",
            found=f"no attribute {', '.join(absent)}",
            next_step="write self.name = name for each of them",
        )
    for name in fields.keys() - cls.JSON_EXCLUDED:
        object.__setattr__(config, name, _frozen(getattr(config, name), f"{cls.__name__}.{name}"))
    lost = [
        f"{name}={value!r}"
        for name, value in handed_on.items()
        if name not in fields
        or (name not in cls.JSON_EXCLUDED and _is_dropped(fields[name], value, vars(config)[name]))
    ]
    if lost:
        raise ConfigError(
            path=f"{cls.__name__}.__init__",
            expected="fields of the config, handed on by super().__init__(**kwargs)",
            found=f"{', '.join(lost)}, which came to nothing",
            next_step="name them as parameters of __init__, or hand **kwargs on",
        )


def _declares_model_type(cls: type[Any]) -> bool:
    """Return whether a subclass of the class with the generated `__init__` sets `model_type`.

    The generated `__init__` would set the default of its own class instead.
    """
    for parent in cls.__mro__:
        if "__init__" in vars(parent) and not has_written_init(parent):
            return False
        if isinstance(vars(parent).get("model_type"), str):
            return True
    return False


def _is_dropped(field: dataclasses.Field[Any], argument: Any, kept: Any) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(kept == default and _frozen(argument, field.name) != default)


def _frozen(value: Any, name: str) -> Any:
    """Return an immutable, hashable value: lists become tuples, and dicts FrozenJSON."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(_frozen(item, name) for item in value)
    return FrozenJSON(value, name=name) if type(value) is dict else value
