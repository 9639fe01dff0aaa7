"""Orbax's own tests of its manager, with Cairn's in its place: `python -m tests.peers CHECKOUT`."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from tests.devices import xla_flags
from tests.peers.limits import DOCUMENTED, INTERNAL

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/checkpoint-manager.md"
SUITES = ("checkpoint_manager_test.py",)
"""Below `orbax/checkpoint` in the checkout: those that go through the manager."""


def outcomes(suite: Path, folder: Path, *, drop_in: bool) -> dict[str, dict[str, str]]:
    """Return how each test of a file ends, by name.

    The file runs from a folder outside the checkout, so that it imports the installed Orbax.
    """
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(suite, folder)
    results = folder / "results.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "CAIRN_PEER"},
        **({"CAIRN_PEER": "cairn"} if drop_in else {}),
        "CAIRN_PEER_PORT": str(port),
        "CAIRN_PEER_RESULTS": str(results),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "XLA_FLAGS": xla_flags(8),
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
    if any_error := [name for name, pattern, _ in DOCUMENTED + INTERNAL if not pattern]:
        sys.exit(f"tests/peers/limits.py takes any error of {', '.join(any_error)}")
    base, results = {}, {}
    for number, name in enumerate(SUITES):
        suite = Path(checkout) / "orbax/checkpoint" / name
        base |= outcomes(suite, folder / f"orbax-{number}", drop_in=False)
        results |= outcomes(suite, folder / f"cairn-{number}", drop_in=True)
    groups: dict[str, list[str]] = {"passed": [], "documented": [], "internal": [], "differs": []}
    for name in sorted(name for name, result in base.items() if result["outcome"] == "passed"):
        ended = results.get(name, {"outcome": "missing", "error": "not run"})
        documented, internal = (
            reason(name, ended["error"], rows) for rows in (DOCUMENTED, INTERNAL)
        )
        if ended["outcome"] == "passed":
            groups["passed"].append(name)
        elif documented is not None:
            groups["documented"].append(f"{name}: {documented}")
        elif internal is not None:
            groups["internal"].append(f"{name}: {internal}")
        else:
            groups["differs"].append(f"{name}: {ended['error'][:300]}")
    for group, names in groups.items():
        if group != "passed":
            print(f"\n{group}:", *names, sep="\n  ")
    print(f"\n{sum(map(len, groups.values()))} tests pass on Orbax; on ours:")
    print(", ".join(f"{len(names)} {group}" for group, names in groups.items()))
    return len(groups["differs"])


if __name__ == "__main__":
    if not sys.argv[1:]:
        print("Orbax's own tests did not run: make peers ORBAX=/path/to/a/checkout/of/orbax")
        sys.exit(0)
    with tempfile.TemporaryDirectory(prefix="cairn-peers-") as temporary:
        sys.exit(main(sys.argv[1], Path(temporary)) > 0)
