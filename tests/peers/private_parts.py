"""Parts of Orbax that its public API does not promise, by name: those that its own tests need."""

import importlib
import importlib.metadata
from typing import Any

import pytest


def private(module: str, attribute: str | None = None) -> Any:
    """Import a module of Orbax that its public API does not promise, or an attribute of it.

    Raises:
        pytest.UsageError: this release of Orbax does not have it (docs/adr/0016).
    """
    try:
        imported = importlib.import_module(module)
        return imported if attribute is None else getattr(imported, attribute)
    except (ImportError, AttributeError) as error:
        name = module if attribute is None else f"{module}.{attribute}"
        version = importlib.metadata.version("orbax-checkpoint")
        raise pytest.UsageError(
            f"Orbax {version} has no {name}, which tests/peers needs to run Orbax's tests on one "
            f"process: find what took its place, and change it there ({error})"
        ) from error
