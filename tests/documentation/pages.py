"""The pages, and the blocks of code in them."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOT_RUN = "console"
"""What a block of commands is called that needs a server, a cluster or a cloud."""


class Block(NamedTuple):
    """A fenced block: where it is, what stands behind its fence, and its text."""

    place: str
    kind: str
    title: str
    text: str


def pages():
    """Every page that people read, the two beside the site's among them."""
    own = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return own + sorted(DOCS.rglob("*.md"))


def blocks(page):
    """The fenced blocks of a page in order; one that does not end is an error."""
    found, start = [], None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        assert line == "```", f"{page.name}:{number}: a fence within a fence"
        kind, _, title = lines[start - 1].removeprefix("```").partition(" ")
        text = "".join(f"{one}\n" for one in lines[start : number - 1])
        place = f"{page.relative_to(ROOT).as_posix()}:{start}"
        found.append(Block(place, kind, title.removeprefix('title="').rstrip('"'), text))
        start = None
    assert start is None, f"{page.name}:{start}: a fence without an end"
    return found
