"""Where the files are that this folder looks at, and what they may name before it is there."""

from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"

VARIABLES_TO_COME: Final[frozenset[str]] = frozenset()
"""Used in deploy/, and not read by the code yet."""

COMMANDS_TO_COME: Final[frozenset[tuple[str, ...]]] = frozenset()
"""Run in deploy/ or its pages, and no commands yet."""


def documents(path: Path) -> list[Any]:
    """Every document of a YAML file."""
    found = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return [document for document in found if document is not None]
