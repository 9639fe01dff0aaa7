"""What is built from the source tree, as users get it."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("cairn", "service", "state", "storage", "pyproject.toml", "README.md", "LICENSE")


def build(kind: str, source: Path, target: Path) -> Path:
    """A distribution (`wheel` or `sdist`), built by the backend of this environment, offline."""
    target.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta as b; b.build_{kind}({str(target)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A copy of what a distribution is made from: building leaves files where it works."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def wheel(source, tmp_path_factory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """An interpreter with the wheel in it, and what this one has besides."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Behind the wheel, and without this environment's own .pth files: its Cairn is not found.
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return folder / "bin" / "python"
