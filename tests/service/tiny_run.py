"""The tiny run of real training, for tests that only look at what is stored of it."""

import fcntl
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.programs.program import SHARED
from tests.tiny import make_run


@cache
def _trained() -> Path:
    """Train once for all workers: it takes seconds to trace what a step does."""
    folder = Path(os.environ.get(SHARED) or tempfile.mkdtemp(prefix="tiny-")) / "trained"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            make_run(str(folder))
            (folder / "done").touch()
    return folder / "tiny"


def copy_tiny_run(root: Path) -> None:
    """Put the run `tiny`, whose steps are 1 and 2, into a root."""
    shutil.copytree(_trained(), root / "tiny")
