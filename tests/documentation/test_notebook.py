"""The tutorial works from the first line to the last: what its notebook's cells say is done."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.documentation.pages import DOCS, ROOT, blocks
from tests.programs.commands import commands
from tests.programs.program import run as run_program
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


def test_each_program_of_the_page_imports_what_it_uses(tmp_path):
    """In the notebook they share one interpreter, on the page each is a program."""
    programs = [block for block in blocks(PAGE) if block.kind == "python"]
    assert programs
    for number, block in enumerate(programs):
        (tmp_path / f"program_{number}.py").write_text(block.text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_cells_do_what_the_page_says(tmp_path):
    """As one program; `test_notebook_cells.py` has Jupyter execute them."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    with TemporaryDirectory() as folder, commands(Path(folder)) as forked:
        variables = environment(tmp_path)
        variables["PATH"] = f"{forked}{os.pathsep}{variables['PATH']}"
        done = run_program(["-c", "\n".join(map(program, code))], cwd=tmp_path, env=variables)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    check_outcome(done.stdout, tmp_path)


def program(cell):
    """What a cell does, in Python alone."""
    if not cell.startswith("%%bash\n"):
        return cell
    script = cell.removeprefix("%%bash\n")
    return f"import subprocess; subprocess.run(['bash', '-c', {script!r}], check=True)"


def check_outcome(told, folder):
    assert "production" in told
    assert "largest difference" in told
    assert (folder / "exported").is_symlink()
