"""Checks of the installation: versions, entry points, conflicting packages, the command."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from packaging.specifiers import SpecifierSet

import cairn
from cairn.installation import CHECKED, DISTRIBUTION, untested_versions, wrong_versions
from cairn.service.command.doctor.findings import Finding, Outcome

ENTRY_POINTS: Final = {
    ("console_scripts", "cairn"): "cairn.service.command.cli:main",
    ("cairn.durable_steps", "announce"): "cairn.service.client.announcing:announce",
}
"""Entry points that an installation of this version registers: (group, name) -> object."""

_OURS: Final = ("interop", "service", "state", "storage")
_ELSEWHERE: Final = "unset PYTHONPATH"
_INSTALL: Final = f"python -m pip install --force-reinstall --no-deps '{DISTRIBUTION}'"


def check_versions() -> Iterator[Finding]:
    """Check the versions of Python and of the packages that a training job depends on."""
    try:
        own = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        text = f"expected an installed {DISTRIBUTION}, found a source tree alone"
        fix = f"python -m pip install '{DISTRIBUTION}'"
        yield Finding("versions", Outcome.WARN, text, fix)
        return
    python = ".".join(map(str, sys.version_info[:3]))
    supported = SpecifierSet(own["Requires-Python"])
    if not supported.contains(python, prereleases=True):
        text = f"expected Python {supported}, found {python}"
        yield Finding("versions", Outcome.FAIL, text, "python3.12 -m venv .venv")
    differences = [(Outcome.FAIL, *difference) for difference in wrong_versions()]
    differences += [(Outcome.WARN, *difference) for difference in untested_versions()]
    for outcome, requirement, version in differences:
        yield Finding(
            "versions",
            outcome,
            f"expected {requirement.name} {requirement.specifier}, found {version}",
            f"python -m pip install '{requirement.name}{requirement.specifier}'",
        )
    different = {requirement.name for _, requirement, _ in differences}
    there = [f"cairn {own['Version']}", f"Python {python}"]
    for name in sorted(CHECKED - different):
        try:
            there.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue  # a package of an extra that is not installed
    yield Finding("versions", Outcome.OK, ", ".join(there))


def check_entry_points(path: Sequence[str]) -> Iterator[Finding]:
    """Check that the installation registers the entry points of this code.

    After an update of an editable install, those of an older version may be registered.

    Args:
        path: Import path, such as `sys.path`.
    """
    installed = list(metadata.distributions(name=DISTRIBUTION, path=list(path)))
    if not installed:
        return  # `check_versions` reports it
    if len(places := {str(distribution.locate_file("")) for distribution in installed}) > 1:
        text = f"expected one installation of {DISTRIBUTION}, found {', '.join(sorted(places))}"
        fix = f"python -m pip uninstall {DISTRIBUTION}, until none is left, and install it again"
        yield Finding("entry points", Outcome.WARN, text, fix)
    there = {(point.group, point.name): point.value for point in installed[0].entry_points}
    wrong = [key for key, value in ENTRY_POINTS.items() if there.get(key) != value]
    for group, name in wrong:
        yield Finding(
            "entry points",
            Outcome.FAIL,
            f"expected {group}: {name} = {ENTRY_POINTS[group, name]}, found "
            f"{there.get((group, name), 'none')}: the installation is of another version than "
            "the code",
            _INSTALL,
        )
    if not wrong:
        yield Finding("entry points", Outcome.OK, "match this version")


def check_names(path: Sequence[str]) -> Iterator[Finding]:
    """Check that no other package shadows `cairn`, or has the name of one of its subpackages.

    Args:
        path: Import path, such as `sys.path`.
    """
    own = Path(cairn.__file__).resolve().parent
    installed = _installed_place()
    if installed is not None and installed.resolve() != own:
        text = f"cairn is imported from {own}, and installed at {installed}"
        yield Finding("names", Outcome.WARN, text, f"{_ELSEWHERE}; cd ~")
    others = [
        place
        for folder in dict.fromkeys(Path(entry or os.curdir) for entry in path)
        for place in (folder / "cairn" / "__init__.py", folder / "cairn.py")
        if place.is_file() and place.resolve().parent != own
    ]
    for place in others:
        text = f"expected one package cairn, found another at {place}"
        yield Finding("names", Outcome.WARN, text, f"{_ELSEWHERE}; cd ~")
    for name in _OURS:
        spec = PathFinder.find_spec(name, list(path))
        if spec is None or spec.origin is None:  # a folder without modules shadows nothing
            continue
        if Path(spec.origin).resolve().parent == (own / name).resolve():
            text = f"import {name} would find second copies of the modules of cairn.{name}"
            yield Finding("names", Outcome.WARN, text, f"import cairn.{name}, or work elsewhere")
        else:
            text = f"{name} is another package, at {spec.origin}: cairn.{name} is Cairn's"
            yield Finding("names", Outcome.WARN, text, f"import cairn.{name}, where it is meant")


def _installed_place() -> Path | None:
    """Return the folder of the installed package; None if Cairn runs without being installed."""
    try:
        installed = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    place = Path(str(installed.locate_file("cairn")))
    if place.exists():
        return place
    # An editable install keeps no files in site-packages; PEP 610 records its source tree.
    source = json.loads(installed.read_text("direct_url.json") or "{}").get("url", "")
    return Path(unquote(source.removeprefix("file://"))) / "cairn" if source else None


def check_commands(path: str, prefix: Path) -> Iterator[Finding]:
    """Check that the shell runs the `cairn` command of this Python.

    Args:
        path: Value of the variable PATH.
        prefix: Folder of this Python's commands.
    """
    commands = [
        Path(folder) / "cairn"
        for folder in dict.fromkeys(path.split(os.pathsep))
        if folder and os.access(Path(folder) / "cairn", os.X_OK)
    ]
    commands = [command for command in commands if command.is_file()]
    if not commands:
        fix = f'export PATH="{prefix}:$PATH"'
        yield Finding("command", Outcome.WARN, "expected a command cairn on PATH, found none", fix)
    elif commands[0].parent.resolve() != prefix.resolve():
        text = f"expected the command of this Python, {prefix / 'cairn'}, found {commands[0]} first"
        yield Finding("command", Outcome.WARN, text, f'export PATH="{prefix}:$PATH"; hash -r')
    elif len({command.resolve() for command in commands}) > 1:
        text = f"{commands[0]} is first on PATH, found others: {', '.join(map(str, commands[1:]))}"
        yield Finding("command", Outcome.WARN, text, "which -a cairn")
    else:
        yield Finding("command", Outcome.OK, f"{commands[0]}")
