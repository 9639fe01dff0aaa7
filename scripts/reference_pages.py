"""Write the reference pages and charts of the documentation that are made from code and results.

    python scripts/reference_pages.py           # writes them below docs/
    python scripts/reference_pages.py --check   # exit status 1 if one differs

They are committed, so that links to them lead somewhere in the repository too.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(DOCS / "hooks")]
    pages = importlib.import_module("generated_pages").generated_pages()
    charts = importlib.import_module("results_tables").plots()
    differing = [
        (path, text)
        for path, text in {**pages, **charts}.items()
        if not (DOCS / path).is_file() or (DOCS / path).read_text(encoding="utf-8") != text
    ]
    for path, text in differing:
        if arguments.check:
            print(f"docs/{path}: differs from what its source says. Run `make format`.")
        else:
            (DOCS / path).write_text(text, encoding="utf-8")
    return 1 if arguments.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
