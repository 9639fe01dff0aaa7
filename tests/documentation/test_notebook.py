"""The tutorial works from the first line to the last: its notebook is executed as it lies there."""

import json
import subprocess
import sys

import pytest

from tests.documentation.pages import DOCS, ROOT, blocks
from tests.test_docs import environment

PAGE = DOCS / "tutorial" / "first-run.md"
NOTEBOOK = DOCS / "tutorial" / "first-run.ipynb"


def test_the_notebook_is_what_the_page_says():
    done = subprocess.run(
        [sys.executable, "scripts/notebook.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


def test_every_block_of_the_page_is_in_the_notebook():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for block in blocks(PAGE):
        if block.text.startswith("cairn serve"):
            assert any(json.dumps(block.text.split()) in one for one in code)
        else:
            assert any(one.endswith(block.text.rstrip()) for one in code), block.place


@pytest.mark.parametrize(
    "block", [one for one in blocks(PAGE) if one.kind == "python"], ids=lambda one: one.place
)
def test_each_program_of_the_page_imports_what_it_uses(block):
    """In the notebook they share one interpreter, on the page each is a program."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "-"]
    done = subprocess.run(command, input=block.text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(600)
def test_the_notebook_runs_from_the_first_cell_to_the_last(tmp_path):
    copy = tmp_path / NOTEBOOK.name  # a notebook works in its own folder
    copy.write_bytes(NOTEBOOK.read_bytes())
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", str(copy)]
    variables = environment(tmp_path) | {
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "jupyter"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    outputs = [
        output.get("text", "")
        for cell in json.loads(copy.read_text(encoding="utf-8"))["cells"]
        for output in cell.get("outputs", [])
    ]
    told = "".join("".join(one) for one in outputs)
    assert "production" in told
    assert "largest difference" in told
    assert (tmp_path / "exported").is_symlink()
