"""Registry of names in data: model families by `model_type`, model classes by name.

Nothing is ever imported because a file says so. A name is looked up among the classes that this
process has defined, and in the two tables here of what ships with Cairn; of those, the module is
imported when it is asked for.

A checkpoint stores the name and the module of its model's class. For a class that ships with Cairn
the module is stored as "cairn", wherever its file lies: `cairn.DecoderForCausalLM` is what a user
imports too.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from cairn.state.errors import ConfigError, UnknownModelError

__all__ = [
    "class_identity",
    "family",
    "find",
    "is_family",
    "is_hidden",
    "known_families",
    "module_class",
    "register",
    "shipped_decoder",
]

PACKAGE = "cairn"
"""Module name that a checkpoint stores for a class that ships with Cairn."""

FAMILIES = "cairn.state.families.known"
"""The package of families: each module's name is its `model_type`, and it defines `FAMILY`."""

MODELS: Mapping[str, str] = {"DecoderForCausalLM": "cairn.state.decoder.decoder"}
"""The model classes that ship with Cairn, and the modules that define them."""

_CLASSES: dict[tuple[str, str], type[Any]] = {}


def known_families() -> list[str]:
    """Return every family's `model_type`, sorted."""
    return list(_families())


@functools.cache
def _families() -> tuple[str, ...]:
    """Return the names of the family modules in the package, whatever name a caller gives."""
    folder = importlib.import_module(FAMILIES).__path__
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folder)))


def is_family(model_type: object) -> bool:
    """Return whether a `model_type` is that of a family."""
    return model_type in _families()


def family(model_type: str) -> Any:
    """Return the `Family` of a `model_type`.

    Raises:
        ConfigError: if it is unknown; the known ones are listed.
    """
    if not is_family(model_type):
        raise ConfigError(
            path="model_type",
            expected=f"one of {', '.join(known_families())}",
            found=repr(model_type),
            next_step="convert the model to a known family, or add one: docs/howto/add-a-family.md",
        )
    return importlib.import_module(f"{FAMILIES}.{model_type}").FAMILY


def class_identity(model_class: type[Any]) -> dict[str, str]:
    """Return the name and module of a model class, as a checkpoint stores them."""
    name, module = model_class.__name__, model_class.__module__
    return {"model_class": name, "model_module": PACKAGE if _ships(name, module) else module}


def register(model_class: type[Any]) -> None:
    """Remember a model class; a later one of the same module and name replaces it."""
    _CLASSES[model_class.__module__, model_class.__name__] = model_class


def is_hidden(model_class: type[Any]) -> bool:
    """Return whether a load would find a later class of the same module and name instead."""
    known = _CLASSES.get((model_class.__module__, model_class.__name__))
    return known is not None and known is not model_class


def module_class(model_class: type[Any]) -> type[Any]:
    """Return the module class that a model class is loaded as; for Linen models, the NNX form."""
    linen_form: Any = getattr(model_class, "nnx_class", None)
    found: type[Any] = model_class if linen_form is None else linen_form()
    return found


def shipped_decoder() -> type[Any]:
    """Return `DecoderForCausalLM`, the model class of every family."""
    return _shipped("DecoderForCausalLM")


def find(name: str, module: str | None, *, path: object) -> type[Any]:
    """Return the model class that a checkpoint names.

    Args:
        name: the class's name.
        module: where it was defined when it was saved; decides between classes of one name.
        path: the checkpoint, for the message.

    Raises:
        UnknownModelError: if no class, or more than one, has that name.
    """
    if module is not None and _ships(name, module):
        return _shipped(name)
    if module is not None and (module, name) in _CLASSES:
        return _CLASSES[module, name]
    if name in MODELS:
        _shipped(name)
    named = [cls for (_, known), cls in _CLASSES.items() if known == name]
    if len(named) == 1:
        return named[0]
    known = ", ".join(sorted(f"{mod}.{cls}" for mod, cls in _CLASSES)) or "none"
    raise UnknownModelError(
        path=path,
        expected=f"one model class named {name!r} (defined in {module} when it was saved)",
        found=f"{len(named)} among those defined in this process: {known}",
        next_step="import the module that defines it, or pass model_class=",
    )


def _ships(name: str, module: str) -> bool:
    return module.partition(".")[0] == PACKAGE and name in MODELS


def _shipped(name: str) -> type[Any]:
    model_class: type[Any] = getattr(importlib.import_module(MODELS[name]), name)
    return model_class
