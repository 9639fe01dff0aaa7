"""The wheel and the source distribution hold one package, `cairn`, with all of its files."""

import configparser
import tarfile
import zipfile

import pytest

from tests.packaging.conftest import ROOT, build

FOLDERS = ("interop", "service", "state", "storage")
NO_MODULES = {".md"}  # READMEs of folders are for those who read the source


def expected():
    """Every file that an installation needs, as a path of the package."""
    own = [path for path in (ROOT / "cairn").iterdir() if path.is_file()]
    found = {f"cairn/{path.name}" for path in own}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in NO_MODULES:
                found.add(f"cairn/{path.relative_to(ROOT).as_posix()}")
    return found


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    assert names_in(wheel) == expected()


@pytest.mark.parametrize(
    "name",
    [
        "cairn/__init__.pyi",
        "cairn/py.typed",
        "cairn/interop/py.typed",
        "cairn/service/catalog/migrations/env.py",
        "cairn/service/catalog/migrations/script.py.mako",
        "cairn/service/dashboard/templates/layout.html",
        "cairn/service/dashboard/static/cairn.css",
        "cairn/service/dashboard/templates/step/overview.html",
        "cairn/service/dashboard/static/vendor/htmx.min.js",
        "cairn/service/dashboard/static/vendor/htmx.LICENSE",
    ],
)
def test_files_that_are_no_modules_are_there(name, wheel):
    assert name in names_in(wheel)


def test_the_source_distribution_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as content:
        assert not [member.name for member in content if member.issym() or member.islnk()]
        content.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert names_in(build("wheel", unpacked, tmp_path / "wheel")) == names_in(wheel)


def test_the_wheel_has_one_name_and_one_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (top,) = [name for name in archive.namelist() if name.endswith("top_level.txt")]
        (commands,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert archive.read(top).split() == [b"cairn"]
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(commands).decode())
        assert {name: dict(entries[name]) for name in entries.sections()} == {
            "console_scripts": {"cairn": "cairn.service.command.cli:main"},
            "cairn.durable_steps": {"announce": "cairn.service.client.announcing:announce"},
        }
