"""The README's code runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
FIVE_MINUTES = README.parent / "docs" / "tutorial" / "first-five-minutes.md"


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


def test_the_first_five_minutes_are_those_of_the_page_that_a_test_runs():
    text, page = (path.read_text(encoding="utf-8") for path in (README, FIVE_MINUTES))
    section = text.partition("\n## First five minutes\n")[2].partition("\n## ")[0]
    (typed,) = re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (run,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = [line.partition("#")[0].strip() for line in typed.splitlines()]
    assert len(commands) == 4
    assert [one for one in commands if f"\n{one}" not in f"\n{run}"] == []
    (program,) = re.findall(r'^```python title="save.py"\n(.*?)^```$', page, re.M | re.DOTALL)
    assert program == re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
