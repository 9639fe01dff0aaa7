"""`cairn` is the one name that Cairn takes, and the one that its own code uses."""

import subprocess
import sys

import pytest

from tests.packaging.conftest import ROOT


def lint(text):
    """What ruff says of a file of this repository."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", "tests/new.py", "-"],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "import storage",
        "import state.errors",
        "from service import create_app",
        "from storage.runs.run import Run",
    ],
)
def test_importing_a_folder_by_its_own_name_is_refused(line):
    status, said = lint(f"{line}\n")
    assert status == 1
    assert "TID251" in said
    assert "ADR 14" in said


def test_the_one_name_and_namesakes_of_others_are_not():
    text = "from google.cloud import storage\n\nfrom cairn import state\n\nprint(state, storage)\n"
    assert lint(text) == (0, "All checks passed!\n")
