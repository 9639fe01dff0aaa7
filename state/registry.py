"""Which model classes this process has defined, so that a checkpoint can name its own.

Nothing is ever imported because a checkpoint says so: only classes that are already defined here,
and the ones that ship with this package, can be found.
"""

from typing import TYPE_CHECKING, Any

from cairn.state.errors import UnknownModelError

if TYPE_CHECKING:
    from cairn.state.base_module import EasyDeLBaseModule

__all__ = ["class_identity", "find", "register"]

_CLASSES: dict[tuple[str, str], "type[EasyDeLBaseModule]"] = {}


def class_identity(model_class: type[Any]) -> dict[str, str]:
    """Returns what a checkpoint stores of a model class: its name and its module."""
    return {"model_class": model_class.__name__, "model_module": model_class.__module__}


def register(model_class: "type[EasyDeLBaseModule]") -> None:
    """Remembers a model class; a later one of the same module and name takes its place."""
    _CLASSES[model_class.__module__, model_class.__name__] = model_class


def find(name: str, module: str | None, *, path: object) -> "type[EasyDeLBaseModule]":
    """Returns the model class that a checkpoint names.

    Args:
        name: the class's name.
        module: where it was defined when it was saved; decides between classes of one name.
        path: the checkpoint, for the message.

    Raises:
        UnknownModelError: if no class, or more than one, has that name.
    """
    import cairn.state.decoder.decoder  # noqa: F401  (its classes register themselves)

    if module is not None and (module, name) in _CLASSES:
        return _CLASSES[module, name]
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
