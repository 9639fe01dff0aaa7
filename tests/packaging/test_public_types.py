"""What type checkers see of an installed `cairn`, in a file and with a configuration of the user's.

mypy, which reads JAX and Flax for 12 s of CPU, is asked by `make proofs` (`test_mypy_types.py`).
Pyright is run as basedpyright, which is the same checker with its node program in the wheel: the
package `pyright` fetches it when it is first run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cairn

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


OTHERS = {
    "names.py": "import cairn\n" + "".join(f"reveal_type(cairn.{n})\n" for n in cairn.__all__),
    "none_of_ours.py": "from cairn import NoSuchName\n",
    "repository.py": "import cairn.storage\nimport storage\n",
}
"""Files beside `use.py`, which a checker reads in the same run: it takes seconds to begin."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the user's files."""
    folder = tmp_path_factory.mktemp("job")
    for name, text in {"use.py": PROGRAM, **OTHERS}.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def pyright(installed, programs):
    """The diagnostics of pyright, by file."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "basedpyright",
            "--outputjson",
            f"--pythonpath={installed}",
            *["use.py", *OTHERS],
        ],
        cwd=programs,
        env=OUTSIDE,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout, done.stderr
    found = {}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        found.setdefault(Path(one["file"]).name, []).append(one)
    return found


def errors(diagnostics):
    return [one["message"] for one in diagnostics if one["severity"] == "error"]


def test_pyright_sees_what_a_name_is(pyright):
    found = pyright["use.py"]
    assert errors(found) == []
    notes = {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in found
        if one["severity"] == "information"
    }
    assert [notes[line].rpartition(' is "')[2].rstrip('"') for line in sorted(notes)] == PYRIGHT
    assert min(notes) == FIRST_LINE


def test_no_public_name_is_unknown(pyright):
    notes = [one for one in pyright["names.py"] if one["severity"] == "information"]
    found = [one["message"].rpartition(' is "')[2].rstrip('"') for one in notes]
    assert len(found) == len(cairn.__all__)
    unknown = [
        name for name, text in zip(cairn.__all__, found, strict=True) if text in ("Any", "Unknown")
    ]
    assert unknown == []


def test_pyright_knows_that_a_name_is_none_of_ours(pyright):
    assert errors(pyright["none_of_ours.py"]) == ['"NoSuchName" is unknown import symbol']


def test_pyright_reads_the_installed_package_and_not_the_repository(pyright):
    assert errors(pyright["repository.py"]) == ['Import "storage" could not be resolved']
