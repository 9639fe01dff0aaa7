"""Makes the notebook of the tutorial from its page, so that there is one text and one code.

Text becomes cells of text; `python` blocks become cells, `sh` blocks cells of bash. What a program
and a terminal do by themselves a notebook is told: to wait for the last save, and to go on while
the control plane runs.

    python scripts/notebook.py           # write docs/tutorial/first-run.ipynb
    python scripts/notebook.py --check   # say whether it is up to date
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "tutorial"
PAGE: Final = FOLDER / "first-run.md"
NOTEBOOK: Final = FOLDER / "first-run.ipynb"
BLOCK: Final = re.compile(r"^```(python|sh)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\[([^\]]+)\]\((?:\.\./|first-run)[^)]*\)")
SERVE: Final = "cairn serve"
WAIT: Final = """\
# A program ends once its saves are durable; a notebook goes on, so it waits here.
if "save" in globals():
    save.wait()
"""
END: Final = """\
server.terminate()
server.wait()
"""


def cells(page: str) -> Iterator[dict[str, Any]]:
    """The cells of a page, without what only the site has: links to its other pages."""
    position, trained = 0, False
    for block in BLOCK.finditer(page):
        yield from _text(page[position : block.start()])
        position = block.end()
        language, text = block.groups()
        if language == "python":
            yield _code(text)
            if not trained:
                yield _code(WAIT)
                trained = True
        elif text.startswith(SERVE):
            yield _code(_serving(text.split()))
        else:
            yield _code(f"%%bash\nset -eu\n{text}")
    yield from _text(page[position:])
    yield _code(END)


def notebook(page: str) -> str:
    """The notebook's file."""
    made = list(cells(page))
    for number, cell in enumerate(made, 1):
        cell["id"] = f"cell-{number}"
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    content = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _serving(words: list[str]) -> str:
    return (
        "import subprocess\n\n"
        f"server = subprocess.Popen({json.dumps(words)}, stdout=subprocess.PIPE, text=True)\n"
        'print(next(line for line in server.stdout if "http" in line))\n'
    )


def _text(text: str) -> Iterator[dict[str, Any]]:
    plain = LINK.sub(r"\1", text).strip()
    if plain:
        yield {"cell_type": "markdown", "metadata": {}, "source": _lines(plain)}


def _code(text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": _lines(text.rstrip()),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> int:
    """Write the notebook, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    made = notebook(PAGE.read_text(encoding="utf-8"))
    if not arguments.check:
        NOTEBOOK.write_text(made, encoding="utf-8")
    elif not NOTEBOOK.is_file() or NOTEBOOK.read_text(encoding="utf-8") != made:
        print(f"{NOTEBOOK}: expected what {PAGE} says, found another text. Run `make format`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
