"""Loops as people have them come to Cairn by the lines that the documentation shows.

One is run; `make proofs` runs the others (`test_long_examples.py`), and `tests/state/drop_in`
proves of each name that they call what it does.
"""

import os
import re
import shutil
from pathlib import Path

from tests.devices import xla_flags
from tests.programs.program import run as run_program

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/howto/checkpoint-manager.md"
DIFF = re.compile(r"^```diff\n--- (\S+)\n\+\+\+ \1\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIFFS = dict(DIFF.findall(PAGE.read_text(encoding="utf-8")))
MOST_LINES = 5
UNTIL = 7
SHORT = "examples/loops/flax_tutorial.py"


def patched(text, diff):
    """`text` after the hunks of `diff`, each of which is found once."""
    for hunk in re.split(r"^@@.*@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
        old = "".join(f"{line}\n" for sign, line in lines if sign != "+")
        new = "".join(f"{line}\n" for sign, line in lines if sign != "-")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def run(place, module, folder, until):
    ended = run_program(
        ["-m", module, str(folder), str(until)],
        cwd=place,
        env={**os.environ, "XLA_FLAGS": xla_flags(4)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_page_changes_every_loop_by_few_lines():
    loops = {
        path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("examples/loops/*")
    }
    assert {*DIFFS} <= loops
    assert len(DIFFS) == 3
    for name, diff in DIFFS.items():
        compile(changed_text(name), name, "exec")
        signs = [line[:1] for line in diff.splitlines() if line[1:].strip()]
        assert signs.count("+") <= MOST_LINES
        assert signs.count("-") <= MOST_LINES


def test_a_changed_loop_goes_on_to_the_numbers_that_the_loop_had(tmp_path):
    check_changed_loop(SHORT, tmp_path)


def changed_text(name):
    """A loop with the lines that the page shows."""
    text = patched((REPOSITORY / name).read_text(encoding="utf-8"), DIFFS[name])
    assert "cairn" in text
    return text


def check_changed_loop(name, tmp_path):
    """A loop that is changed, and interrupted, prints what it prints without either."""
    module = name.removesuffix(".py").replace("/", ".")
    expected = run(REPOSITORY, module, tmp_path / "uninterrupted", UNTIL)
    shutil.copytree(REPOSITORY / "examples/loops", tmp_path / "changed/examples/loops")
    (tmp_path / "changed/examples/__init__.py").touch()
    (tmp_path / "changed" / name).write_text(changed_text(name), encoding="utf-8")
    run(tmp_path / "changed", module, tmp_path / "run", 4)
    assert (tmp_path / "run/run.json").exists()
    assert run(tmp_path / "changed", module, tmp_path / "run", UNTIL) == expected
