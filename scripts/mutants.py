"""Change single places of the code, and count the changes that the tests notice.

    python scripts/mutants.py map                       # run the suite once: which test runs a line
    python scripts/mutants.py run --seed 1 --count 300  # draw changes, run the tests of their lines

A change that no test notices is printed with its place. The map lies in `.cache/mutants`, and fits
the tree that it was made of. A line that only other processes run counts as run by no test.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".cache" / "mutants"
PACKAGES: Final = ("storage", "service")
GENERATED: Final = "by `python scripts/sync_client.py`"
"""Text in files that are not changed: they are made of others."""

WORKERS: Final = 2
TESTS_SECONDS: Final = 90
"""Of the tests that run a line the quickest, up to this sum of their durations."""
DEADLINE_SECONDS: Final = 420

COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """One change of the code.

    Attributes:
        path: of the file, relative to the repository.
        line: first line of the change.
        kind: what is changed.
        before: the source text.
        after: the text in its place.
        start: offset of the text in the file's bytes.
    """

    path: str
    line: int
    kind: str
    before: str
    after: str
    start: int


# -- the map ---------------------------------------------------------------------------------------


class Mapping:
    """Plugin of pytest: which test runs which lines, and how long it takes."""

    def __init__(self) -> None:
        import coverage

        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._coverage = coverage.Coverage(
            data_file=str(FOLDER / f"lines.{worker}"),
            include=[f"{ROOT / package}/*" for package in PACKAGES],
            concurrency="thread",
            messages=False,
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note the lines that a test runs, and its duration."""
        self._coverage.switch_context(item.nodeid)
        began = time.perf_counter()
        outcome: Any = yield
        with (FOLDER / f"seconds.{os.getpid()}").open("a") as file:
            file.write(json.dumps([item.nodeid, time.perf_counter() - began]) + "\n")
        self._coverage.switch_context("")
        return outcome

    def pytest_sessionfinish(self) -> None:
        """Write the map of this process."""
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    """Start to note lines, where this file was given to pytest as a plugin."""
    distributes = getattr(config.option, "numprocesses", None)
    if not distributes or "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.register(Mapping(), "mutants-map")


def make_map(tests: Sequence[str]) -> int:
    """Run the suite once; return pytest's exit status."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    command = "-m pytest -p scripts.mutants -p no:cacheprovider -q -n 4 --dist loadfile"
    done = subprocess.run([sys.executable, *command.split(), *tests], cwd=ROOT, check=False)
    return done.returncode


def read_map() -> tuple[dict[tuple[str, int], list[str]], dict[str, float]]:
    """Return the tests that run each (path, line), and the seconds of each test."""
    import coverage

    tests: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for file in FOLDER.glob("lines.*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for measured in data.measured_files():
            path = os.path.relpath(os.path.realpath(measured), ROOT)
            for line, contexts in data.contexts_by_lineno(measured).items():
                tests[path, line] += [context for context in contexts if context]
    seconds: dict[str, float] = {}
    for file in FOLDER.glob("seconds.*"):
        seconds |= dict(map(json.loads, file.read_text().splitlines()))
    return tests, seconds


# -- changes ---------------------------------------------------------------------------------------


def mutants_of(path: Path) -> list[Mutant]:
    """List the changes of a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    mutants = []
    nodes: Iterator[Any] = ast.walk(tree)
    for node in nodes:
        if (change := _change(node)) is None:
            continue
        kind, after = change
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        name = str(path.relative_to(ROOT))
        mutants.append(Mutant(name, node.lineno, kind, before, after, start))
    return mutants


def _change(node: Any) -> tuple[str, str] | None:
    """Return (kind, source text) of a node after its change; None for one that is not changed."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARED:
            changed = ast.Compare(node.left, [COMPARED[type(operator)]()], node.comparators)
            return "comparison", f"({ast.unparse(changed)})"
        case ast.BoolOp(op=operator):
            swapped = ast.Or() if isinstance(operator, ast.And) else ast.And()
            return "and/or", f"({ast.unparse(ast.BoolOp(swapped, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            return "not", f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            return "flag", str(not value)
        case ast.Constant(value=int(value)):
            return "number", str(value + 1)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            opposite = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            if any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
                return None
            return "sum", f"({ast.unparse(ast.BinOp(node.left, opposite, node.right))})"
        case ast.Raise(exc=ast.Call()):
            return "no refusal", "pass"
        case ast.Expr(value=ast.Call() | ast.Await()):
            return "no call", "pass"
    return None


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw changes of both packages, each place as likely as every other."""
    every = [
        mutant
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if GENERATED not in path.read_text(encoding="utf-8")
        for mutant in mutants_of(path)
    ]
    return random.Random(seed).sample(every, count)


# -- trials ----------------------------------------------------------------------------------------


def copy_tree(folder: Path) -> None:
    """Copy the files that git tracks, links as links."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in names.stdout.decode().split("\0")[:-1]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


def is_noticed(mutant: Mutant, tests: Sequence[str], folder: Path) -> bool:
    """Return True if one of the tests fails, or does not end, with the change."""
    file = folder / mutant.path
    source = file.read_bytes()
    before = mutant.before.encode()
    assert source[mutant.start :].startswith(before)
    file.write_bytes(
        source[: mutant.start] + mutant.after.encode() + source[mutant.start + len(before) :]
    )
    command = "-m pytest -x -q -p no:cacheprovider -p no:xdist --timeout 60"
    try:
        done = subprocess.run(
            [sys.executable, *command.split(), *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_bytes(source)
    return done.returncode != 0


def run(seed: int, count: int) -> int:
    """Try changes; print those that nobody notices, and the share of the others."""
    tests, seconds = read_map()
    folders: SimpleQueue[Path] = SimpleQueue()
    unnoticed: list[str] = []
    not_run = 0

    def try_out(mutant: Mutant) -> None:
        nonlocal not_run
        ids = sorted(set(tests.get((mutant.path, mutant.line), ())), key=lambda id_: seconds[id_])
        chosen: list[str] = []
        left = float(TESTS_SECONDS)
        for test in ids:
            left -= seconds[test]
            if chosen and left < 0:
                break
            chosen.append(test)
        folder = folders.get()
        noticed = bool(chosen) and is_noticed(mutant, chosen, folder)
        folders.put(folder)
        if not noticed:
            not_run += not chosen
            first = f"{mutant.path}:{mutant.line}: {mutant.kind}, {len(chosen)} of {len(ids)} tests"
            unnoticed.append(f"{first}\n    {mutant.before!r} -> {mutant.after!r}")
            print(unnoticed[-1], flush=True)

    with TemporaryDirectory() as scratch, ThreadPoolExecutor(WORKERS) as pool:
        for number in range(WORKERS):
            copy_tree(Path(scratch, str(number)))
            folders.put(Path(scratch, str(number)))
        list(pool.map(try_out, draw(seed, count)))
    share = 100 * (count - len(unnoticed)) / count
    print(f"seed {seed}: {share:.1f} % of {count} changes noticed; {not_run} are run by no test")
    return 0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("map").add_argument("tests", nargs="*", default=["tests"])
    trial = commands.add_parser("run")
    trial.add_argument("--seed", type=int, default=1)
    trial.add_argument("--count", type=int, default=300)
    arguments = parser.parse_args()
    if arguments.command == "map":
        return make_map(arguments.tests)
    return run(arguments.seed, arguments.count)


if __name__ == "__main__":
    sys.exit(main())
