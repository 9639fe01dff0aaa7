"""Count what makes this code hard or easy to move into, and print it as a table.

    python scripts/house.py [--list docstrings|names|helpers|suffixes|arrows|tests]
    python scripts/house.py --check   # no docstring begins with a question word (ruff allows some)

Counts are of `storage/`, `interop/`, `state/` and `service/`, whichever are there. They show a
direction; none of them is a proof that the code reads well.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("storage", "interop", "state", "service")

QUESTION_WORDS = frozenset(
    ["what", "whether", "how", "why", "where", "which", "who", "whose", "when", "if", "that"]
)
VAGUE_NAMES = frozenset(
    ["found", "one", "known", "wanted", "made", "told", "asked", "given", "held", "ours", "theirs"]
)
EMPTY_NAMES = VAGUE_NAMES | {"result", "value", "data", "info", "obj"}
SUFFIXES = ("Item", "Part", "Place")
SHORT_HELPER_LINES = 6
NO_JAX = re.compile(r"\b(no|without|never imports?|not import) JAX\b", re.IGNORECASE)

Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One Python file.

    Attributes:
        path: relative to the repository.
        text: its source.
        tree: its syntax tree.
    """

    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """Folder that the file lies in."""
        return str(self.path.parent)


class LineCount(NamedTuple):
    """Lines of some modules: all, those with code, those with only a comment, those of imports."""

    total: int
    code: int
    comments: int
    imports: int


def modules() -> list[Module]:
    """Return the Python files of the packages."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    texts = ((path.relative_to(ROOT), path.read_text()) for path in paths)
    return [Module(path, text, ast.parse(text)) for path, text in texts]


def line_count(module: Module) -> LineCount:
    """Count a module's lines; a docstring's lines are neither code nor comments."""
    documented = {
        line for node in _docstrings(module.tree) for line in range(node.lineno, _end(node) + 1)
    }
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _BLANK_TOKENS:
            code |= {*range(token.start[0], token.end[0] + 1)} - documented
    imports = {
        line
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, _end(node) + 1)
    }
    total = module.text.count("\n")
    return LineCount(total, len(code), len(comments), len(imports))


_BLANK_TOKENS = frozenset(
    (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Yield strings that stand alone: docstrings, and those below attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield node


def functions(module: Module) -> Iterator[Definition]:
    """Yield the functions and methods of a module."""
    for node in ast.walk(module.tree):
        if isinstance(node, Definition):
            yield node


def question_docstrings(module: Module) -> Iterator[str]:
    """Yield the functions whose docstring begins with a question word."""
    for node in functions(module):
        text = ast.get_docstring(node)
        word = re.match(r"\w+", text or "")
        if word and word[0].lower() in QUESTION_WORDS:
            yield f"{module.path}:{node.lineno} {node.name}: {(text or '').splitlines()[0]}"


def vague_names(module: Module, names: frozenset[str]) -> Iterator[str]:
    """Yield where a name is bound that says nothing of what it holds: as variable or argument."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
            yield f"{module.path}:{node.lineno} {node.id}"
        elif isinstance(node, ast.arg) and node.arg in names:
            yield f"{module.path}:{node.lineno} {node.arg}"


def lone_helpers(module: Module) -> Iterator[str]:
    """Yield private functions of a few lines that their module names once.

    Those that it passes as a value, and never calls, have " (passed)" at the end of their line.
    """
    called = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    }
    uses = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    for node in functions(module):
        is_private = node.name.startswith("_") and not node.name.startswith("__")
        first = node.body[1] if len(node.body) > 1 and ast.get_docstring(node) else node.body[0]
        lines = _end(node) - first.lineno + 1
        is_called_once = not node.decorator_list and uses[node.name] == 1
        if is_private and is_called_once and lines <= SHORT_HELPER_LINES:
            passed = "" if node.name in called else " (passed)"
            yield f"{module.path}:{node.lineno} {node.name}{passed}"


def suffixed_classes(module: Module, suffix: str) -> Iterator[str]:
    """Yield the classes whose name ends so."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(suffix):
            yield f"{module.path}:{node.lineno} {node.name}"


def arrows(all_modules: Iterable[Module], packages: tuple[str, ...]) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second, within these packages."""
    rooms = {module.room for module in all_modules}
    pairs = set()
    for module in all_modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("cairn."):
                continue
            for alias in node.names:
                target = _room_of(f"{node.module}.{alias.name}", rooms)
                if target is not None and target != module.room:
                    pairs.add((module.room, target))
    return {pair for pair in pairs if all(name.split("/")[0] in packages for name in pair)}


def _room_of(name: str, rooms: set[str]) -> str | None:
    """Return the deepest folder that a dotted name of `cairn` leads into."""
    parts = name.split(".")[1:]
    folders = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((folder for folder in folders if folder in rooms), None)


def inner_imports(all_modules: Iterable[Module], tests: Iterable[Path]) -> Iterator[str]:
    """Yield the imports by tests of names that only their own room uses.

    A room is here a folder of a package, with all that is in it.
    """

    def imported(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cairn."):
                for alias in node.names:
                    yield node.lineno, str(node.module), alias.name

    rooms_of: dict[tuple[str, str], set[tuple[str, ...]]] = defaultdict(set)
    for module in all_modules:
        for _, name, part in imported(module.tree):
            rooms_of[name, part].add(module.path.parts[:2])
    for path in tests:
        lines: dict[int, list[str]] = defaultdict(list)
        for line, name, part in imported(ast.parse(path.read_text())):
            room = tuple(name.split(".")[1:3])
            if not rooms_of[name, part] - {room, (room[0],)}:
                lines[line].append(f"{name}.{part}")
        for line, names in sorted(lines.items()):
            yield f"{path.relative_to(ROOT)}:{line} {', '.join(names)}"


def ruff_count(rule: str) -> int:
    """Return how often ruff finds a rule broken."""
    folders = [package for package in PACKAGES if (ROOT / package).is_dir()]
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        rule,
        "--output-format",
        "json",
    ]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True)
    return len(json.loads(done.stdout))


def main() -> None:
    """Print the counts, or what one of them is made of."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--list",
        choices=("docstrings", "names", "helpers", "suffixes", "arrows", "tests"),
        default=None,
    )
    parser.add_argument("--check", action="store_true", help="fail on docstrings that ask")
    arguments = parser.parse_args()
    chosen, every = arguments.list, modules()
    questions = [line for module in every for line in question_docstrings(module)]
    if arguments.check:
        sys.exit("\n".join(questions) or 0)
    lists = {
        "docstrings": questions,
        "names": [line for module in every for line in vague_names(module, VAGUE_NAMES)],
        "helpers": [line for module in every for line in lone_helpers(module)],
        "suffixes": [
            line
            for module in every
            for suffix in SUFFIXES
            for line in suffixed_classes(module, suffix)
        ],
        "tests": [*inner_imports(every, sorted((ROOT / "tests").rglob("*.py")))],
        "arrows": [" -> ".join(pair) for pair in sorted(arrows(every, PACKAGES[:-1]))],
    }
    if chosen is not None:
        print(*lists[chosen], sep="\n")
        return
    counts = [line_count(module) for module in every]
    total, code, comments, imports = (sum(column) for column in zip(*counts, strict=True))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    rooms = {module.room for module in every}
    all_names = sum(len([*vague_names(module, EMPTY_NAMES)]) for module in every)
    rows: list[tuple[str, object]] = [
        ("lines of code", f"{code:,} ({total:,} with blanks, comments and docstrings)"),
        ("files; lines of imports", f"{len(every)}; {imports:,}"),
        ("comments per 100 lines of code", f"{100 * comments / code:.1f}"),
    ]
    for package in PACKAGES:
        pairs = zip(every, counts, strict=True)
        own = [count for module, count in pairs if module.path.parts[0] == package]
        if own:
            lines, comment_lines = sum(count.code for count in own), sum(c.comments for c in own)
            share = f"{100 * comment_lines / lines:.1f} comments per 100"
            rows.append((f"  {package}", f"{lines:,} lines in {len(own)} files, {share}"))
    rows += [
        ("docstrings that begin with a question word", len(lists["docstrings"])),
        ("docstrings that are no command (ruff D401)", ruff_count("D401")),
        ("variables named found, one, known, …", len(lists["names"])),
        ("  and result, value, data, info, obj", all_names),
        ("private helpers named once, short", len(lists["helpers"])),
        ("  of these passed as values, not called", sum(" (" in line for line in lists["helpers"])),
        *(
            (f"classes *{suffix}", sum(line.endswith(suffix) for line in lists["suffixes"]))
            for suffix in SUFFIXES
        ),
        ("arrows between rooms below the service", len(lists["arrows"])),
        ("rooms of state", sum(room.split("/")[0] == "state" for room in rooms)),
        ("import contracts", len(contracts)),
        ("imports by tests of names that their room alone uses", len(lists["tests"])),
        ("modules that say they have no JAX", sum(bool(NO_JAX.search(m.text)) for m in every)),
    ]
    width = max(len(name) for name, _ in rows)
    for name, number in rows:
        print(f"{name:<{width}}  {number}")


if __name__ == "__main__":
    main()
