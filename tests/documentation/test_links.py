"""Links between the files that are read in the repository lead somewhere; the site's own check has
the rest.
"""

import re

import pytest

from tests.documentation.pages import DOCS, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FOLDERS = ("", "benchmarks", "examples", "interop", "service", "state", "storage", "tests")
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))


def anchors(text):
    """Those of headings, as forges and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"\s+", "-", one) for one in plain} | set(re.findall(r"\{ #([\w-]+) \}", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_a_file_lead_somewhere(page):
    lost = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        made = target.is_relative_to(DOCS / "reference" / "service")  # when the site is built
        if not target.exists() and not made:
            lost.append(link)
        elif anchor and target.suffix == ".md" and target.exists():
            lost += [link] * (anchor not in anchors(target.read_text(encoding="utf-8")))
    assert lost == []
