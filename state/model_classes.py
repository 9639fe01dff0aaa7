"""Model classes by name, as checkpoints name them.

A checkpoint stores the name and the module of its model's class. A load never imports a module
because a checkpoint names it: it looks the class up among those that this process has defined, and
among those that ship with Cairn (`MODELS`). For the latter the stored module is "cairn", as in
`cairn.DecoderForCausalLM`, so that their files can move.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from cairn.interop.errors import UnknownModelError

__all__ = [
    "class_identity",
    "find",
    "is_hidden",
    "module_class",
    "register",
    "shipped_decoder",
]

PACKAGE = "cairn"
"""Module name that a checkpoint stores for a class that ships with Cairn."""

MODELS: Mapping[str, str] = {"DecoderForCausalLM": "cairn.state.models.decoder.decoder"}
"""The model classes that ship with Cairn, and the modules that define them.

The modules are names because models import states: a state can import its model only when it loads.
"""

_CLASSES: dict[tuple[str, str], type[Any]] = {}


def class_identity(model_class: type[Any]) -> dict[str, str]:
    """Return the name and module of a model class, as a checkpoint stores them."""
    name, module = model_class.__name__, model_class.__module__
    return {"model_class": name, "model_module": PACKAGE if _ships(name, module) else module}


def register(model_class: type[Any]) -> None:
    """Register a model class for `find`; a later one of the same module and name replaces it."""
    _CLASSES[model_class.__module__, model_class.__name__] = model_class


def is_hidden(model_class: type[Any]) -> bool:
    """Return whether a later class of the same module and name was registered, and is found."""
    registered = _CLASSES.get((model_class.__module__, model_class.__name__))
    return registered is not None and registered is not model_class


def module_class(model_class: type[Any]) -> type[Any]:
    """Return the module class that a model class is loaded as; for Linen models, the NNX form."""
    linen_form: Any = getattr(model_class, "nnx_class", None)
    nnx_class: type[Any] = model_class if linen_form is None else linen_form()
    return nnx_class


def shipped_decoder() -> type[Any]:
    """Return `DecoderForCausalLM`, the model class of every family."""
    return _shipped("DecoderForCausalLM")


def find(name: str, module: str | None, *, path: object) -> type[Any]:
    """Return the model class that a checkpoint names.

    Args:
        name: the class's name.
        module: the class's module when it was saved; decides between classes of the same name.
            None if unknown.
        path: the checkpoint, for the error.

    Raises:
        UnknownModelError: if no class has that name, or several do and none is of that module.
    """
    if module is not None and _ships(name, module):
        return _shipped(name)
    if module is not None and (module, name) in _CLASSES:
        return _CLASSES[module, name]
    if name in MODELS:
        _shipped(name)
    named = [cls for (_, class_name), cls in _CLASSES.items() if class_name == name]
    if len(named) == 1:
        return named[0]
    names = ", ".join(sorted(f"{mod}.{cls}" for mod, cls in _CLASSES)) or "none"
    raise UnknownModelError(
        path=path,
        expected=f"one model class named {name!r} (defined in {module} when it was saved)",
        found=f"{len(named)} among those defined in this process: {names}",
        next_step="import the module that defines it, or pass model_class=",
    )


def _ships(name: str, module: str) -> bool:
    return module.partition(".")[0] == PACKAGE and name in MODELS


def _shipped(name: str) -> type[Any]:
    model_class: type[Any] = getattr(importlib.import_module(MODELS[name]), name)
    return model_class
