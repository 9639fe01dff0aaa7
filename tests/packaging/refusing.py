"""Programs that run as if packages were not installed."""

import os
import subprocess
import sys
from collections.abc import Iterable

from cairn.installation import MODULES
from tests.packaging.conftest import ROOT

BESIDES = ("gguf", "safetensors", "starlette", "torch", "transformers")
"""What comes with an extra without being named in it, or with an extra of its own."""

EVERY_EXTRA = (*(module for modules in MODULES.values() for module in modules), *BESIDES)
TRAIN = (*(set(MODULES["train"]) - set(MODULES["server"])), "torch", "transformers", "gguf")

PRELUDE = """\
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""
COMMAND = "from cairn.service.command.cli import main\nmain()\n"


def without(modules: Iterable[str], program: str = COMMAND) -> list[str]:
    """The command line of a program that finds none of these modules; arguments follow it."""
    return [sys.executable, "-c", PRELUDE.format(refused=frozenset(modules)) + program]


def variables(**more: str) -> dict[str, str]:
    """The environment of such a program: no setting of ours, and this source tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAIRN_")}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **more}


def run(command: list[str], *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run one to its end."""
    return subprocess.run(
        [*command, *arguments], env=variables(**more), capture_output=True, text=True, timeout=120
    )
