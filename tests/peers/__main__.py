"""Orbax's own tests, of Cairn's code in its place: `python -m tests.peers CHECKOUT`."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from tests.devices import xla_flags
from tests.peers.limits import DOCUMENTED, INTERNAL, REFUSED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/checkpoint-manager.md"
ADOPT_PAGE = ROOT / "docs/howto/adopt.md"
HANDLERS = ("json", "random_key", "array", "standard", "pytree", "composite")
SUITES = {
    "checkpoint_manager_test.py": "manager",
    **{f"_src/handlers/{name}_checkpoint_handler_test.py": "handlers" for name in HANDLERS},
}
"""Whose place Cairn's code takes in each file below `orbax/checkpoint` in the checkout."""
WRITERS = (
    "_src/checkpointers/checkpointer_test.py",
    "checkpoint_utils_test.py",
    "single_host_test.py",
    *(
        f"experimental/v1/_src/{name}_test.py"
        for name in (
            "handlers/pytree_handler",
            "layout/orbax_v0_layout",
            "loading/layout_loading",
            "partial/saving",
            "testing/save_load",
            "testing/v1_checkpointer_compatibility",
        )
    ),
)
"""Others that leave checkpoints; Orbax's own code runs in all of them."""
FOLDER_SECONDS = 600
"""For comparing the folders that the tests leave; those that are left then are counted."""
GROUPS = ("passed", "documented", "internal", "apart", "differs")


def outcomes(suite: Path, folder: Path, *, place: str | None) -> dict[str, dict[str, str]]:
    """Return how each test of a file ends, by name.

    The file runs from a folder outside the checkout, so that it imports the installed Orbax.
    """
    folder.mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(suite, folder)
    results = folder / "results.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **_environment(folder),
        **({"CAIRN_PEER_KEEP": "1"} if place is None else {"CAIRN_PEER": place}),
        "CAIRN_PEER_PORT": str(port),
        "CAIRN_PEER_RESULTS": str(results),
    }
    command = "-m pytest -q --tb=short -p no:cacheprovider -p tests.peers.plugin --timeout 120"
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [sys.executable, *command.split(), suite.name],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not results.is_file():
        sys.exit(
            f"{suite.name}: pytest wrote no results.\n{(folder / 'log.txt').read_text()[-3000:]}"
        )
    return json.loads(results.read_text())


def _environment(folder: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "CAIRN_PEER"},
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "XLA_FLAGS": xla_flags(8),
    }


def compare_folders(kept: Path, folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return how many of the checkpoints that tests left are read alike, and those that are not."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.peers.folders", kept, str(FOLDER_SECONDS)],
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    return figures["counts"], figures["different"]


def reason(name: str, error: str, rows: list[tuple[str, str, str]]) -> str | None:
    """Return the reason of the first row that matches how a test failed."""
    matches = (
        text for names, pattern, text in rows if fnmatch(name, names) and re.search(pattern, error)
    )
    return next(matches, None)


def main(checkout: str, folder: Path) -> int:
    """Print the figures; return the number of tests that differ."""
    page = PAGE.read_text()
    if unsaid := [text for *_, text in DOCUMENTED if text not in page]:
        sys.exit(f"{PAGE} does not say: {'; '.join(unsaid)}")
    if unsaid := [text for *_, text in REFUSED if text not in ADOPT_PAGE.read_text()]:
        sys.exit(f"{ADOPT_PAGE} does not say: {'; '.join(unsaid)}")
    if any_error := [name for name, pattern, _ in DOCUMENTED + INTERNAL if not pattern]:
        sys.exit(f"tests/peers/limits.py takes any error of {', '.join(any_error)}")
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    table = []
    for name, place in SUITES.items():
        suite = Path(checkout) / "orbax/checkpoint" / name
        base = outcomes(suite, folder / "orbax" / suite.stem, place=None)
        results = outcomes(suite, folder / f"cairn-{suite.stem}", place=place)
        counts = Counter[str]()
        for test in sorted(test for test, end in base.items() if end["outcome"] == "passed"):
            group, text = judge(test, results.get(test, {"outcome": "missing", "error": "not run"}))
            counts[group] += 1
            groups[group].append(f"{suite.stem}::{test}: {text}")
        table.append((suite.stem, counts))
    for group in GROUPS[1:]:
        print(f"\n{group}:", *groups[group], sep="\n  ")
    print(f"\n{sum(map(len, groups.values()))} tests pass on Orbax; on ours:")
    for name, counts in table:
        print(f"{name}: " + ", ".join(f"{counts[group]} {group}" for group in GROUPS))
    for name in WRITERS:
        writer = Path(checkout) / "orbax/checkpoint" / name
        outcomes(writer, folder / "orbax" / f"{len(table)}-{writer.stem}", place=None)
    figures, different = compare_folders(folder / "orbax", folder / "imports")
    unlike = [line for line in different if reason("", line, REFUSED) is None]
    if unlike:
        print("\nfolders that differ:", *unlike, sep="\n  ")
    figures |= {"documented": len(different) - len(unlike), "differ": len(unlike)}
    print("\nfolders:", ", ".join(f"{count} {group}" for group, count in figures.items()))
    return len(groups["differs"]) + len(unlike)


def judge(name: str, end: dict[str, str]) -> tuple[str, str]:
    """Return the group of a test that passes on Orbax, and the reason."""
    if end["outcome"] == "passed":
        return "passed", ""
    if end["outcome"] == "apart":
        return "apart", "calls none of the handlers that were replaced"
    for group, rows in (("documented", DOCUMENTED), ("internal", INTERNAL)):
        if (text := reason(name, end["error"], rows)) is not None:
            return group, text
    return "differs", end["error"][:300]


if __name__ == "__main__":
    if not sys.argv[1:]:
        print("Orbax's own tests did not run: make peers ORBAX=/path/to/a/checkout/of/orbax")
        sys.exit(0)
    with tempfile.TemporaryDirectory(prefix="cairn-peers-") as temporary:
        sys.exit(main(sys.argv[1], Path(temporary)) > 0)
