"""The tutorial's notebook is what its page says, whose programs import what they use.

`make proofs` has Jupyter execute it (`test_notebook_cells.py`); what its cells do one after the
other, `make test` does in `tests/test_main_job.py`.
"""

import json
import subprocess
import sys

from tests.documentation.pages import DOCS, ROOT, blocks

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


def test_each_program_of_the_page_imports_what_it_uses(tmp_path):
    """In the notebook they share one interpreter, on the page each is a program."""
    programs = [block for block in blocks(PAGE) if block.kind == "python"]
    assert programs
    for number, block in enumerate(programs):
        (tmp_path / f"program_{number}.py").write_text(block.text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
