"""What type checkers see of an installed `cairn`, in a file and with a configuration of the user's.

Pyright is run as basedpyright, which is the same checker with its node program in the wheel: the
package `pyright` fetches it when it is first run.
"""

import json
import os
import re
import subprocess
import sys

import pytest

import cairn
from tests.packaging.conftest import ROOT

PROGRAM = """\
import cairn
from cairn import AsyncClient, CheckpointReader, Checkpointer, Client
from cairn import EasyDeLState, RunSaver, TrainState

reveal_type(cairn.EasyDeLState)
reveal_type(EasyDeLState.load_state("runs/a"))
reveal_type(EasyDeLState.load_state("runs/a").save_state("runs/b"))
reveal_type(Client)
reveal_type(next(Client().runs()).latest_step)
reveal_type(AsyncClient().runs())
reveal_type(Checkpointer)
reveal_type(RunSaver)
reveal_type(TrainState)
reveal_type(CheckpointReader)
"""

MYPY = [
    r"def \(.*\) -> cairn\.state\S*\.EasyDeLState",
    r"cairn\.state\S*\.EasyDeLState",
    r"cairn\.storage\.training\.saving\.save_handle\.SaveHandle",
    r"def \(.*\) -> cairn\.service\.client\.client\.Client",
    r"int \| None",
    r"typing\.AsyncGenerator\[cairn\.service\.schemas\.Run, None\]",
    r"def \(.*\) -> cairn\.storage\.training\.checkpointer\.Checkpointer",
    r"def \(.*\) -> cairn\.state\S*\.RunSaver",
    r"def \(.*\) -> cairn\.state\S*\.TrainState",
    r"def \(.*\) -> cairn\.storage\.reading\.reader\.CheckpointReader",
]
PYRIGHT = [
    "type[EasyDeLState]",
    "EasyDeLState",
    "SaveHandle",
    "type[Client]",
    "int | None",
    "AsyncGenerator[Run, None]",
    "type[Checkpointer]",
    "type[RunSaver]",
    "type[TrainState]",
    "type[CheckpointReader]",
]
FIRST_LINE = 5
OUTSIDE = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "job" / "use.py"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    return path


def mypy(python, program, *more):
    """mypy --strict, with no configuration but the command line's.

    What it has found is kept from run to run, and used again for files whose content is the same.
    """
    cache = ROOT / ".cache" / "mypy-installed"
    options = [
        "--config-file=",
        "--strict",
        f"--python-executable={python}",
        f"--cache-dir={cache}",
    ]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, program.name, *more],
        cwd=program.parent,
        env=OUTSIDE,
        capture_output=True,
        text=True,
        timeout=240,
    )


def pyright(python, program):
    """The diagnostics of pyright, by line."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "basedpyright",
            "--outputjson",
            f"--pythonpath={python}",
            program.name,
        ],
        cwd=program.parent,
        env=OUTSIDE,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["generalDiagnostics"]


def test_mypy_sees_what_a_name_is_and_that_another_is_none(installed, program):
    done = mypy(installed, program)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r'^use\.py:\d+: note: Revealed type is "(.*)"$', done.stdout, re.MULTILINE)
    assert len(found) == len(MYPY)
    for pattern, text in zip(MYPY, found, strict=True):
        assert re.fullmatch(pattern, text), text

    other = program.with_name("other.py")
    other.write_text("from cairn import NoSuchName\n")
    done = mypy(installed, other)
    assert done.returncode == 1
    assert 'Module "cairn" has no attribute "NoSuchName"' in done.stdout


def test_no_public_name_is_any(installed, program):
    program.write_text(
        "import cairn\n" + "".join(f"reveal_type(cairn.{n})\n" for n in cairn.__all__)
    )
    done = mypy(installed, program)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r'Revealed type is "(.*)"$', done.stdout, re.MULTILINE)
    assert len(found) == len(cairn.__all__)
    unknown = [name for name, text in zip(cairn.__all__, found, strict=True) if text == "Any"]
    assert unknown == []


def test_pyright_sees_what_a_name_is(installed, program):
    found = pyright(installed, program)
    assert [one for one in found if one["severity"] == "error"] == []
    notes = {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in found
        if one["severity"] == "information"
    }
    assert [notes[line].rpartition(' is "')[2].rstrip('"') for line in sorted(notes)] == PYRIGHT
    assert min(notes) == FIRST_LINE


def test_pyright_knows_that_a_name_is_none_of_ours(installed, program):
    program.write_text("from cairn import NoSuchName\n")
    (error,) = [one for one in pyright(installed, program) if one["severity"] == "error"]
    assert error["message"] == '"NoSuchName" is unknown import symbol'


def test_pyright_reads_the_installed_package_and_not_the_repository(installed, program):
    program.write_text("import cairn.storage\nimport storage\n")
    errors = [one["message"] for one in pyright(installed, program) if one["severity"] == "error"]
    assert errors == ['Import "storage" could not be resolved']
