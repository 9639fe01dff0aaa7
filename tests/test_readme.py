"""The README's code runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_readme_python_blocks_run_in_an_empty_folder(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    check = "\nassert save.done and again.size == state.size\n"
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks) + check],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "my-run" / "manifests").is_dir()
