"""What mypy sees of an installed `cairn`: `make proofs`; `make test` asks pyright alone."""

import re
import subprocess
import sys

import pytest

import cairn
from tests.packaging.conftest import ROOT
from tests.packaging.test_public_types import OUTSIDE, programs

__all__ = ["programs"]  # the fixture

MYPY = [
    r"def \(.*\) -> cairn\.state\S*\.EasyDeLState",
    r"cairn\.state\S*\.EasyDeLState",
    r"cairn\.state\S*\.SaveHandle",
    r"def \(.*\) -> cairn\.service\S*\.Client",
    r"int \| None",
    r"typing\.AsyncGenerator\[cairn\.service\S*\.Run, None\]",
    r"def \(.*\) -> cairn\.state\S*\.Checkpointer",
    r"def \(.*\) -> cairn\.state\S*\.RunSaver",
    r"def \(.*\) -> cairn\.state\S*\.TrainState",
    r"def \(.*\) -> cairn\.storage\S*\.CheckpointReader",
]


@pytest.fixture(scope="module")
def mypy(installed, programs):
    """What mypy --strict says, with no configuration but the command line's, by file.

    What it has found is kept from run to run, and used again for files whose content is the same.
    """
    cache = ROOT / ".cache" / "mypy-installed"
    options = [
        "--config-file=",
        "--strict",
        f"--python-executable={installed}",
        f"--cache-dir={cache}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "use.py", "names.py", "none_of_ours.py"],
        cwd=programs,
        env=OUTSIDE,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # for the name that there is not
    found = {}
    for line in done.stdout.splitlines():
        file, _, rest = line.partition(":")
        found.setdefault(file, []).append(rest)
    return found


def revealed(lines):
    """The types that mypy was asked for; it has nothing else to say."""
    found = [re.fullmatch(r'\d+: note: Revealed type is "(.*)"', line) for line in lines]
    assert all(found), lines
    return [one[1] for one in found]


def test_mypy_sees_what_a_name_is(mypy):
    found = revealed(mypy["use.py"])
    assert len(found) == len(MYPY)
    for pattern, text in zip(MYPY, found, strict=True):
        assert re.fullmatch(pattern, text), text


def test_mypy_knows_that_a_name_is_none_of_ours(mypy):
    (error,) = mypy["none_of_ours.py"]
    assert 'error: Module "cairn" has no attribute "NoSuchName"' in error


def test_no_public_name_is_any(mypy):
    found = revealed(mypy["names.py"])
    assert len(found) == len(cairn.__all__)
    unknown = [name for name, text in zip(cairn.__all__, found, strict=True) if text == "Any"]
    assert unknown == []
