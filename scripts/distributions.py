"""Builds the wheel and the source distribution from a copy of the tree.

Building leaves files where it works, so it works elsewhere; the backend is this environment's own,
and nothing is fetched. twine checks what comes out (`make dist`).

    python scripts/distributions.py dist
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = (
    "cairn",
    "interop",
    "service",
    "state",
    "storage",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
KINDS: Final = ("wheel", "sdist")


def copy_sources(folder: Path) -> None:
    """What a distribution is made from, below a folder."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)


def build(kind: str, source: Path, target: Path) -> Path:
    """A distribution (`wheel` or `sdist`), built by the backend of this environment, offline.

    Raises:
        RuntimeError: the backend failed; has what it said.
    """
    target.mkdir(parents=True, exist_ok=True)
    before = set(target.iterdir())
    code = f"from setuptools import build_meta as b; b.build_{kind}({str(target.resolve())!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"{kind}: {done.stdout}{done.stderr}")
    (built,) = set(target.iterdir()) - before
    return built


def main() -> int:
    """Build both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        for kind in KINDS:
            print(build(kind, Path(folder), arguments.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
