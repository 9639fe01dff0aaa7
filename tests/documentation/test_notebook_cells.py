"""The tutorial's notebook is executed by Jupyter as it lies there, its programs started afresh.

`make proofs` does it; what the cells do, `make test` does in `tests/test_main_job.py`.
"""

import json
import subprocess
import sys

import pytest

from tests.documentation.pages import ROOT
from tests.documentation.test_notebook import NOTEBOOK
from tests.test_docs import environment


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
