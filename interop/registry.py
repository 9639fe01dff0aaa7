"""Registry of model families, by `model_type`.

Each module of `interop/families/known` is a family. A config can't cause another import.
"""

import functools
import importlib
import pkgutil
from typing import Any

from cairn.interop.errors import ConfigError

__all__ = ["family", "is_family", "known_families"]

FAMILIES = "cairn.interop.families.known"
"""Package of the families; a module's name is its `model_type`, and it defines `FAMILY`."""


def known_families() -> list[str]:
    """Return every family's `model_type`, sorted."""
    return list(_families())


@functools.cache
def _families() -> tuple[str, ...]:
    """Return the names of the modules in the package of families."""
    folder = importlib.import_module(FAMILIES).__path__
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folder)))


def is_family(model_type: object) -> bool:
    """Return whether a family has this `model_type`."""
    return model_type in _families()


def family(model_type: str) -> Any:
    """Return the `Family` of a `model_type`.

    Raises:
        ConfigError: no family has it; the known values are listed.
    """
    if not is_family(model_type):
        raise ConfigError(
            path="model_type",
            expected=f"one of {', '.join(known_families())}",
            found=repr(model_type),
            next_step="convert the model to a known family, or add one: docs/howto/add-a-family.md",
        )
    return importlib.import_module(f"{FAMILIES}.{model_type}").FAMILY
