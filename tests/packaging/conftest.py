"""What is built from the source tree, as users get it."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """A file of scripts/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = script("distributions").build


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A copy of what a distribution is made from: building leaves files where it works."""
    folder = tmp_path_factory.mktemp("source")
    script("distributions").copy_sources(folder)
    return folder


@pytest.fixture(scope="session")
def wheel(source, tmp_path_factory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(source, tmp_path_factory) -> Path:
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


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
