"""Makes the client that waits from the one that is awaited.

    python scripts/sync_client.py            # write the files
    python scripts/sync_client.py --check    # say which are not what their source gives

`service/client/asynchronous/` is the source; each file of it becomes one of the same name in the
folder above. What two worlds call differently stands in the three tables here, and nowhere else.
"""

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import unasync

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "service" / "client" / "asynchronous"
BY_HAND: Final = frozenset({"__init__.py", "whole_file.py"})
"""Of the source: what the client that waits has in another way, and shares with others."""

MARK: Final = "# Made of {name} by `python scripts/sync_client.py`: change that one.\n"

NAMES: Final = {
    "AsyncBaseTransport": "BaseTransport",
    "AsyncChangesConnection": "ChangesConnection",
    "AsyncClient": "Client",
    "AsyncConnection": "Connection",
    "AsyncEventsConnection": "EventsConnection",
    "AsyncStepFilesConnection": "StepFilesConnection",
    "AsyncTensorsConnection": "TensorsConnection",
    "aclose": "close",
    "aclosing": "closing",
    "aiter_bytes": "iter_bytes",
    "anext": "next",
    "aread": "read",
}
"""Names, in code and in docstrings, beside those that `unasync` knows."""

CODE: Final = (
    (r"\bcairn\.service\.client\.asynchronous\.", "cairn.service.client."),
    (r"\bAsyncGenerator\[([^\[\]]+), None\]", r"Iterator[\1]"),
    (r"\bAsyncGenerator\b", "Iterator"),
    (r"^from anyio import AsyncFile$", "from typing import BinaryIO"),
    (r"\bAsyncFile\[bytes\]", "BinaryIO"),
    (r"^import anyio$", "import threading\nimport time"),
    (r"\banyio\.Semaphore\b", "threading.Semaphore"),
    (r"\banyio\.sleep\b", "time.sleep"),
    (r"\[(\w+) async for \1 in (.+)\]$", r"list(\2)"),
)
"""Patterns of code, before any name is replaced."""

PROSE: Final = (
    (r"\b(?:async|await) ", ""),
    (r"between the tasks of one event loop", "between threads"),
)
"""Patterns of docstrings, before any name is replaced."""


def made(source: Path = SOURCE) -> dict[Path, str]:
    """The files of the client that waits, and what each has to be."""
    found = {}
    for path in sorted(source.glob("*.py")):
        if path.name not in BY_HAND:
            target = source.parent / path.name
            found[target] = _tidy(_mark(source, path) + _translate(path.read_text("utf-8")))
    return found


def differences(source: Path = SOURCE) -> list[str]:
    """What is not as it has to be, a line each."""
    wanted = made(source)
    marked = {
        path
        for path in source.parent.glob("*.py")
        if path.read_text("utf-8").startswith(_mark(source, path))
    }
    wrong = [
        path
        for path, text in wanted.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    return [
        *(
            f"{path}: expected what {source.name}/{path.name} gives, found another"
            for path in wrong
        ),
        *(f"{path}: expected its source, found none" for path in sorted(marked - wanted.keys())),
    ]


def main(arguments: list[str]) -> int:
    """Write the files, or, with `--check`, print what differs; the exit status says whether."""
    if arguments == ["--check"]:
        found = differences()
        if found:
            print(*found, "Run: python scripts/sync_client.py", sep="\n")
        return 1 if found else 0
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
    return 0


def _mark(source: Path, path: Path) -> str:
    return MARK.format(name=f"{source.name}/{path.name}")


def _translate(text: str) -> str:
    text = _replace(text, CODE)
    for docstring in _docstrings(text):
        told = _replace(docstring, PROSE)
        for name, other in NAMES.items():
            told = re.sub(rf"\b{name}\b", other, told)
        text = text.replace(docstring, told)
    with tempfile.TemporaryDirectory() as folder:
        before, after = (Path(folder) / kind / "file.py" for kind in ("awaited", "waiting"))
        before.parent.mkdir()
        before.write_text(text, encoding="utf-8")
        unasync.unasync_files([str(before)], [unasync.Rule("/awaited/", "/waiting/", NAMES)])
        return after.read_text("utf-8")


def _docstrings(text: str) -> list[str]:
    """Every docstring of a module, as it is written."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    first = [body[0].value for body in bodies if isinstance(body[0], ast.Expr)]
    found = [ast.get_source_segment(text, one) for one in first if isinstance(one, ast.Constant)]
    return [one for one in found if one is not None]


def _replace(text: str, table: tuple[tuple[str, str], ...]) -> str:
    for pattern, other in table:
        text = re.sub(pattern, other, text, flags=re.MULTILINE)
    return text


def _tidy(text: str) -> str:
    """As `make format` leaves it: what is not used any more goes, imports are in order."""
    for command in (
        ["check", "--quiet", "--fix", "--unsafe-fixes", "--select", "F401,I,UP028"],
        ["format", "--quiet"],
    ):
        place = ["--stdin-filename", SOURCE.parent / "made.py", "-"]
        ruff = [sys.executable, "-m", "ruff", *command, *place]
        done = subprocess.run(ruff, input=text, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{text}\n{done.stdout}{done.stderr}")
        text = done.stdout
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
