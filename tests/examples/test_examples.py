"""Every example runs to its end; each one checks its own results and fails when they are wrong.

Those of a state of one's own run here, the others in `make proofs` (`test_long_examples.py`): what
a decoder does in them, from its first step to PyTorch, other tests have a smaller one do.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.commands import commands
from tests.programs.interpreter import PYTHON
from tests.programs.program import run as run_program

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(
    path.stem
    for path in (REPOSITORY / "examples").glob("*.py")
    if path.stem not in ("__init__", "checks")
)
LONG = ("lora_finetune", "train_from_scratch")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter for the processes that examples start, forked as they are themselves."""
    with commands(tmp_path_factory.mktemp("commands")) as folder:
        yield folder / "python"


@pytest.mark.parametrize("name", sorted({*EXAMPLES} - {*LONG}))
def test_example_runs_and_its_checks_hold(name, python, tmp_path, tmp_path_factory):
    run_example(name, python, tmp_path, tmp_path_factory.mktemp("torch"))


def run_example(name, python, folder, of_torch):
    """Runs an example in an empty folder, which it leaves so.

    Args:
        name: of the example.
        python: see the fixture.
        folder: for its files.
        of_torch: for what torch makes when it is imported, and leaves.
    """
    # The examples choose their own devices; the tests' choice must not reach them.
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    result = run_program(
        ["-m", f"examples.{name}"],
        cwd=REPOSITORY,
        env={
            **environment,
            "TMPDIR": str(folder),
            PYTHON: str(python),
            "TORCHINDUCTOR_CACHE_DIR": str(of_torch),
            # Threads that wait for each other by spinning are very slow beside other tests.
            "OMP_NUM_THREADS": "1",
        },
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert result.stdout.count("  yes  ") >= 3, result.stdout
    assert list(folder.iterdir()) == []  # it cleans up after itself


def test_a_check_that_does_not_hold_ends_an_example():
    program = "from examples.checks import check; check('one is two', 1 == 2, 1); print('went on')"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "NO   one is two: 1" in result.stdout
    assert "went on" not in result.stdout


def test_examples_that_take_long_are_there():
    assert {*LONG} < {*EXAMPLES}


def test_the_readme_names_every_example():
    text = (REPOSITORY / "examples" / "README.md").read_text(encoding="utf-8")
    assert [name for name in EXAMPLES if f"`{name}.py`" not in text] == []
