"""Cairn keeps the checkpoints of JAX training jobs. What users need is importable from here.

Names are loaded when they are first used: `import cairn` costs nothing and loads no JAX.
"""

import re
from pathlib import Path
from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Return the public object of this name.

    Raises:
        InstallationError: if a package that it needs is not installed; says what to install.
    """
    try:
        return _load(name)
    except ModuleNotFoundError as exc:
        from cairn.installation import missing_extra  # here: `import cairn` stays cheap

        stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
        line = re.search(rf"^from \.(\S+) import {name}\b", stub, re.MULTILINE)
        explained = missing_extra(exc, used=f"cairn.{name}", room=line[1] if line else "")
        if explained is None:
            raise
        raise explained from None
